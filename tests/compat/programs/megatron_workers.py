"""A worker as programs for verl write it: it makes Megatron-core's groups itself."""

import torch
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.megatron.worker import MegatronWorker

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines import build_engine


class OldActor(MegatronWorker):
    """An actor of verl's first releases."""

    def __init__(self, folder: str, tensor: int, pipeline: int):
        super().__init__()
        from megatron.core import parallel_state

        import megatron_on_cpu

        megatron_on_cpu.install()
        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
        sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        self.settings = ModelConfig(path=folder), EngineConfig(name="megatron", **sizes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self.engine = build_engine(*self.settings)
        return self.get_megatron_rank_info(), self.get_megatron_global_info()

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def compute_log_prob(self, data):
        outputs = self.engine.forward(dict(data.batch))
        ranks = torch.full((len(data),), self.rank)
        return DataProto.from_dict({"log_probs": outputs["log_probs"], "rank": ranks})

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)
    def scaled(self, factor):
        return self.rank, factor

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP_PROTO)
    def own_rows(self, data):
        ranks = torch.full((len(data),), self.rank)
        return DataProto.from_dict({"row": data.batch["row"], "rank": ranks})

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP)
    def own_item(self, item):
        return self.rank, item

    @register(dispatch_mode=Dispatch.MEGATRON_PP_ONLY)
    def layers_of_stage(self):
        names = self.engine.pipeline.parameters
        return self.rank, sorted(name for name in names if not name.startswith("decoder.layers"))
