"""The command line and the launcher of local ranks; both start without torch.

Files, each importing only from those above it:

    errors      what the command line tells its user without a traceback
    completion  what lets bash, zsh and fish complete commands
    progress    how far something is, on a terminal
    launch      starts the ranks of a script and leaves none behind
    checkpoint  fsdp-compose checkpoint show|convert
    simulate    fsdp-compose run --simulate
    traced      what each rank of fsdp-compose trace runs
    look        fsdp-compose plan, and the end of fsdp-compose trace
    doctor      fsdp-compose doctor
"""
