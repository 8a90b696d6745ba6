"""A worker that joins a process group and reports the addresses on which its process listens."""

from quadriga.single_controller import Dispatch, Worker, register


class SocketProbe(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def new_listeners(self) -> set[str]:
        """Return the addresses on which this process listens only since it joined the group."""
        import psutil
        import torch

        from quadriga.parallel.distributed import init_distributed

        def listening() -> set[tuple[str, int]]:
            found = psutil.Process().net_connections("inet")
            return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}

        before = listening()
        init_distributed("cpu", timeout_s=60)
        torch.distributed.all_reduce(torch.ones(1))
        return {address for address, _ in listening() - before}
