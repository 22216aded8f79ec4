"""``dynamo-lock``, the command line. Each command imports what it needs when it runs: the program starts fast."""
