"""What everything stands on: the user's choices, meshes, streams, trees, torch's private names.

Files, each importing only from those above it:

    environment    what is read of the environment, without torch
    process        what a process has one of, and why
    launched       ranks that were launched together have a process group
    lazy           imports the package's public names on first use
    loops          loops over many tensors that run in C
    tracked        objects among all that Python's garbage collector knows
    weak_list      a list that keeps nothing alive
    weak_set       a set that keeps nothing alive and has an order
    wording        how errors and reports word what they list
    torch_private  every private torch name, with the versions it was tried on
    attributes     a tensor's attributes as torch stores them, whatever its class answers
    modules        the modules inside a module, without what is left out
    torch_groups   torch's private state of process groups
    torch_stack    which of torch's functions called, read from the stack
    interrupts     Ctrl-C waits for lines that must not end halfway
    exchange       exchanges what two tensor objects hold
    arguments      checks of what functions are given
    codec          what travels in a gather in place of the weights' own bytes
    policy         what the user chose, as frozen values that check themselves
    microbatches   one tree over the microbatches of a step, at every number of ranks
    group          ranks that communicate, and how tensors travel between them
    mesh           which ranks share a shard, which hold replicas, on which device
    streams        the gather and reduce streams of a device
    order          in which order things run, expected to repeat
    tree           tensors inside whatever a module takes and returns
    taken_back     what a forward that is only looked at sets on its modules, undone
    casts          what goes into a unit and comes out, in the dtypes of its policy
    parts          a flat tensor cut by rank, or around spans of it
    strides        how a tensor is flattened
    memory         the bytes that a tensor has in its storage, or had
    unwritten      marks memory that nobody has written yet
"""
