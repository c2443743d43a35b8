"""What strangers and traitors do to a server of ours; see __main__.py."""
