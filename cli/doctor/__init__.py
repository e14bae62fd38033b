"""What `shardq doctor` looks at: a file for each part of an installation, each check yielding findings.

May import what a command may; never torch, nor anything of `workers` but what the command line may load.
"""
