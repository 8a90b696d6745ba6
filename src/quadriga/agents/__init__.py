"""Episodes of several turns between a policy and an environment.

    environments what an environment is: a class or a function in a file of the user
    pool         processes that host the environments of episodes
    pool_worker  the program of such a process
    program      functions of a user that play whole episodes, as environments
    endpoint     an OpenAI-compatible server of the policy, for programs
    turns        which tokens follow a turn that the policy has sampled
    tool_calls   what a tool is, and how calls of tools are read from a turn
    tools        `ToolEnvironment`: calls the tools, and returns their results
    packages     environments of Gymnasium, and tools of MCP servers
    sandbox      runs Python code without a network, within limits

May import every package below `agents` in docs/architecture.md.
"""
