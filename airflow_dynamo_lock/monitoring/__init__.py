"""All locks of a table at one moment, for people and programs that watch them."""
