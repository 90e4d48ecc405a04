"""The one-machine platform: every part as a child process, started in order, watched, and stopped in reverse."""
