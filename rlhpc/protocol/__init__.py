"""Types, messages, contracts, topology and errors that every process shares."""
