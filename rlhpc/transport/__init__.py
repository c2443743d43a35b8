"""Messages between processes: typed, checked, encrypted.  Roles use open.py; see docs/design.md."""
