"""The likeliest token of a vocabulary that is split over the ranks, in plain torch."""

import math

import torch


class TorchChoice:
    """The part of the `Kernels` protocol that chooses tokens. R = rows, N = columns of this rank, X = ranks."""

    def best_token(self, logits_RN: torch.Tensor, start: int) -> torch.Tensor:
        """Return each row's largest logit and its token [R, 2], the first of equals."""
        if not logits_RN.shape[1]:
            return torch.tensor([-math.inf, 0.0], device=logits_RN.device).repeat(len(logits_RN), 1)
        values, columns = logits_RN.max(dim=-1)
        return torch.stack((values.float(), (columns + start).float()), dim=-1)

    def choose_token(self, best_RX2: torch.Tensor) -> torch.Tensor:
        """Return the token [R] of the best pair [R, ranks, 2], -1 where its logit is not finite."""
        values, tokens = best_RX2.unbind(-1)
        top, owner = values.max(dim=-1, keepdim=True)
        return torch.where(top.isfinite(), tokens.gather(-1, owner), -1.0).squeeze(-1).long()
