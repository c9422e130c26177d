"""The command line and the launcher of local ranks; both start without torch.

Files, each importing only from those above it:

    errors      what the command line tells its user without a traceback
    completion  what lets bash, zsh and fish complete commands
    progress    how far something is, on a terminal
    launch      starts the ranks of a script and leaves none behind
    checkpoint  fsdp-compose checkpoint show|convert
    program     a script or a module, run in this process
    simulate    fsdp-compose run --simulate
    traced      what each rank of fsdp-compose trace runs, and how recordings are joined
    plan        fsdp-compose plan
    doctor      fsdp-compose doctor
"""
