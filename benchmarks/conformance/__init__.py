"""What torch's FSDP1, FSDP2, DDP and this library do with the same program, row by row.

Files, each importing only from those above it:

    libraries  the four libraries behind one small face, and a pair of models to compare
    outcomes   runs a row in real gloo ranks and says what came of it
    rows/      the behaviours, by topic
    report     runs every row for every library and writes the table

``python benchmarks/conformance`` runs it, ``--only U6`` one row with what each library said.
"""
