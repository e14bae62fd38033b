"""What people do with batches, for the command line and for Python alike: submit, wait, read, retry, cancel.

It imports storage and tasks, and of `cli` what has no terminal in it. No click and no rich: what is said goes through
a `Voice` (`cli/terminal.py` is the usual one). What a batch stands in is behind `Transport`.
"""
