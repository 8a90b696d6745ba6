"""The command line: `quadriga <command> [key=value …]`.

    main      reads the command line, runs the command, turns errors into messages and exit codes
    commands  the table of commands, with the settings of each
    show      what the commands print

The package is in the highest layer and may import every other package. It imports them inside
functions, so that `--help` does not load torch or Ray.
"""
