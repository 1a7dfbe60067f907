"""Passes that turn several nodes into one."""
