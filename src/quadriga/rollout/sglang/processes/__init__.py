"""What runs in the processes below the rank. Only these modules import SGLang.

- `guard`: ends all of these processes when the rank ends. A script of the standard library alone.
- `host`: holds `sglang.Engine` or SGLang's HTTP server.
- `frames`: messages between rank and host.
- `readback`: reads the weights in SGLang's scheduler. `cpu_seeds`: seeds on a CPU.
"""
