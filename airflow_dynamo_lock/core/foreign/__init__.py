"""The table formats of other lock libraries."""
