"""What a running model routes: gate logs, signals, recent events."""
