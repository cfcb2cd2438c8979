"""gpt-oss-120b: its RL update and its server on 64 chips of v5p.

Command:   python -m launch.compile --config=configs/gpt_oss_120b.py \
             --topology=v5p:4x4x4 --step=train
Hardware:  compiled for v5p:4x4x4, on any machine
Expect:    "fits" for train, prefill and decode, at 32k tokens a sequence
"""

from arl_jax.runtime.pod_config import PodConfig
from arl_jax.sharding import MeshConfig
from configs.gpt_oss_20b import model


def get_config() -> PodConfig:
  return PodConfig(
    model=model(layers=36, experts=128),
    train_mesh=MeshConfig(fsdp=-1, expert=4, tensor=4),
    serve_mesh=MeshConfig(fsdp=1, data=-1, expert=16, tensor=4),
    slots=128,
  )
