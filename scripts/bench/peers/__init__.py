"""The implementations that can be timed, by the names that `--peers` takes."""

from __future__ import annotations

from collections.abc import Callable

from bench.peers.base import Options, Peer, PeerMissingError
from bench.peers.cudnn_sdpa import Cudnn, CudnnFixed
from bench.peers.flash_attention import (
    FlashAttention3,
    FlashAttention3Fixed,
    FlashAttention3Split,
    FlashAttention4,
    FlashAttention4Fixed,
)
from bench.peers.flashinfer_ragged import FlashInfer
from bench.peers.ours import Ours
from bench.peers.torch_sdpa import TorchCudnn, TorchFlash

OURS = "ours"

# Ragged ones first: they do the same job.
PEERS: dict[str, Callable[[Options], Peer]] = {
    OURS: Ours,
    "fa3": FlashAttention3,
    "fa3-split": FlashAttention3Split,
    "fa4": FlashAttention4,
    "cudnn": Cudnn,
    "flashinfer": FlashInfer,
    "fa3-fixed": FlashAttention3Fixed,
    "fa4-fixed": FlashAttention4Fixed,
    "cudnn-fixed": CudnnFixed,
    "torch-flash": TorchFlash,
    "torch-cudnn": TorchCudnn,
}

__all__ = ["OURS", "PEERS", "Options", "Peer", "PeerMissingError"]
