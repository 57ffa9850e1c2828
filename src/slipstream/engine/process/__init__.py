"""The engine core in its own process: its loop, the messages, and the clients in other processes."""
