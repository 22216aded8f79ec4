"""``dynamo-lock``, the command line. It is quick to start: what a command needs is loaded when that command runs."""
