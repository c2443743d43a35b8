"""What a run will be like before it is paid for: the ring in virtual time, with the run's own ledger and packing."""
