"""Checkpoints: save a run so that it can be resumed on any number of ranks, and export models.

    folders     the folders of a run's checkpoints: begin, commit, find, check, prune; the marker, a
                list of files with digests that makes a checkpoint complete
    files       JSON and tensors with their digests
    remote      the copy of a run in a store, and its uploads
    shards      the state of a rank: blocks of tensors, which any number of ranks reads, scalars and
                random states
    writer      writes checkpoints, in the step or beside the next steps
    snapshots   the state of a rank in the memory of another process
    hf_export   a model as a Hugging Face folder

Nothing is pickled: tensors are safetensors files and everything else is JSON, so loading a
checkpoint cannot run code. The package imports `errors` and `observability`, and an
export asks `data` for the end tokens of a chat template. Packages of higher
layers may import it; import names from the modules.
"""
