"""The command line and the launcher of local ranks; both start without torch.

Files, each importing only from those above it:

    launch      starts the ranks of a script and leaves none behind
    checkpoint  fsdp-compose checkpoint show|convert
    simulate    fsdp-compose run --simulate
"""
