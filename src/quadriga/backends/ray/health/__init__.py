"""Whether ranks and nodes are alive, what a rank is doing, and errors that say what happened.

`nodes` probes nodes, reads Ray's record of actors and runs small functions on a rank's node;
`stacks` reads stacks and the last lines of output; `failures` turns Ray's errors into ours.

May import: `cluster` and the packages below `backends`. A call that ends within two seconds enters
none of these files.
"""
