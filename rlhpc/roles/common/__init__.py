"""What every role is made of: start and end, heartbeat, the sessions with a controller."""
