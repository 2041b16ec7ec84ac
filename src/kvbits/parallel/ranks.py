"""``Ranks``: the processes that share a context, and what they tell each other.

Every exchange is a collective of ``torch.distributed``: all ranks must reach it. Where one of them is gone, the others
get a :class:`RankLost` instead of waiting for good.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

TIMEOUT_SECONDS = 300.0
"""How long ranks wait for each other: longer than the slowest of them computes between two exchanges."""

_TEXT_BYTES = 1024
"""Of a text that ranks compare."""


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name since PyTorch 2.13, and before."""


class RankLost(RuntimeError):
    """Another rank ended, or did not come within the time."""


class Ranks:
    """The ranks of one process group.

    Args:
        group: theirs; None is that of all processes.
        timeout_seconds: how long to wait for the others on the CPU (gloo). With NCCL the timeout of the group itself
            holds, as ``init_process_group(timeout=...)`` sets it.

    Raises:
        RuntimeError: if ``torch.distributed`` has not been initialized.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "sharing a context needs several processes: start them with torchrun, and call "
                "torch.distributed.init_process_group first"
            )
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = datetime.timedelta(seconds=timeout_seconds)
        self._waits = dist.get_backend(group) == "gloo"

    @staticmethod
    def of(mesh: DeviceMesh | dist.ProcessGroup | None, timeout_seconds: float = TIMEOUT_SECONDS) -> Ranks:
        """Those of one dimension of a mesh, of a process group, or of all processes.

        Raises:
            TypeError, ValueError: for something else, or a mesh of more than one dimension.
        """
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                raise ValueError(
                    f"this mesh has the dimensions {mesh.mesh_dim_names or mesh.ndim}; name the one along which the "
                    "context is shared, such as mesh['sequence']"
                )
            mesh = mesh.get_group()
        if mesh is not None and not isinstance(mesh, dist.ProcessGroup):
            raise TypeError(f"mesh is a DeviceMesh, a ProcessGroup or None, not {type(mesh).__name__}")
        return Ranks(mesh, timeout_seconds)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """The same: copies of a cache are shared by the same processes."""
        return self

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of every rank, ``[world, *x.shape]``; the shapes must be the same."""
        out = x.new_empty(self.world * x.numel())
        self._run(_all_gather, out, x.contiguous().flatten())
        return out.view(self.world, *x.shape)

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """``x [B, H, t, D]`` of every rank, one behind the other: ``[B, H, world * t, D]``."""
        whole = self.gather(x.contiguous().view(torch.uint8)).view(x.dtype)  # gloo does not know every type
        return whole.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Of ``x [world, ...]``, piece ``r`` goes to rank ``r``; what comes back is from rank 0, 1, and so on."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run(dist.all_to_all_single, out, x)
        return out

    def require_alike(self, what: str, *numbers: int, device: torch.device) -> None:
        """Raise ValueError on every rank where ``numbers`` are not the same on all of them."""
        if differing := self._differently(what, str(list(numbers)), device):
            raise ValueError(
                f"{what} differ between the ranks that share a context ({differing}): each must have the same part of "
                "the model and run the same calls with the same ids; for sampling, set the same seed on all of them"
            )

    def require_same(self, what: str, text: str, *, device: torch.device) -> None:
        """Raise ValueError on every rank where ``text`` is not the same on all of them, with what each of them has."""
        if differing := self._differently(what, text, device):
            raise ValueError(f"{what} must be the same on all ranks that share a context: {differing}")

    def _differently(self, what: str, said: str, device: torch.device) -> str:
        """What each rank says, or nothing where all say the same of the same.

        All such messages have one length: so a rank that is at another point of the program differs, too.
        """
        data = bytearray(f"{what}: {said}".encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES))
        said_by = self.gather(torch.frombuffer(data, dtype=torch.uint8).to(device))
        if bool((said_by == said_by[0]).all()):
            return ""
        texts = [bytes(row).decode(errors="replace").strip().removeprefix(f"{what}: ") for row in said_by.tolist()]
        return "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(texts))

    def _run(self, collective: Callable[..., Any], *tensors: torch.Tensor) -> None:
        try:
            work = collective(*tensors, group=self.group, async_op=True)
            done = work.wait(self.timeout) if self._waits else work.wait()
        except RuntimeError as error:
            raise self._lost(str(error)) from error
        if done is False:
            raise self._lost("no answer")

    def _lost(self, cause: str) -> RankLost:
        return RankLost(
            f"rank {self.rank} of {self.world} lost the others: one of them ended, or did not come within "
            f"{self.timeout.total_seconds():g} s. Each of them holds a part of the context, so this one cannot go on; "
            f"see what the first one to end had to say, and start all of them again ({cause.splitlines()[0][:200]})"
        )
