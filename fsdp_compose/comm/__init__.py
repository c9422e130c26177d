"""How ranks communicate and wait for each other; collectives are called here.

Files, each importing only from those above it:

    flags        bits that ranks combine with an or
    codecs       bf16, and fp8 or int8 values in blocks with a scale each
    sums         adds up what ranks bring to a sum
    waiting      says for whom and for what a rank waits
    posted       messages that may not be over, and their memory
    calls_left   a rank that leaves a call says so
    counts       what ranks have sent so far, so that two tries never meet
    messages     any picklable object between the ranks of a group
    mail         small messages between ranks of one host
    shared_memory  memory that ranks of one host read of each other
    transports   how tensors travel: shared memory, pairs of ranks, or the group's collectives
    own_transports  checks the functions of a user's transport
    heads        ranks say what they do ahead of data
    grad_bucket  the gradients of a bucket, as a communication hook is given them
    meeting      ranks that wait for each other in different groups raise
    under_way    waits for communication, and says that its data did not come
    collectives  gather, reduce and exchange over plain tensors and a group
    uneven       tensors of other sizes on each rank
    small_reduce  a few numbers, compared for what they are
"""
