"""What a run shows and what it writes.

    metrics      the table of all metrics, how values of one step are reduced, and named spans
    trackers     console, JSON lines, TensorBoard, the learning curve as a PNG
    console      the lines, the progress bar and the tables on the terminal
    callbacks    code of the user that is told what happens in a run
    run_folder   the paths in the folder of a run, and its lock: one run at a time
    jsonl        JSON-lines files, and responses as text
    quiet        log levels of other libraries

The package imports `quadriga.errors` and `quadriga.config`; rich, torch and matplotlib only where
they are used. Packages of higher layers may import it; import names from the modules.
"""
