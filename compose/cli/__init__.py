"""The `lingbot` command. It speaks HTTP with a key; only `up`, `down`, `worker` and `doctor` know of processes."""
