"""The kernel log: its messages in every form they are found in, what they mean, and a reader of the live one."""
