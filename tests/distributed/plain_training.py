"""What runs over several ranks are held against: one process, and nothing in it of what is tested there."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from torchtitan_lite.models.llama3.args import ModelArgs
from torchtitan_lite.models.llama3.init import init_weights
from torchtitan_lite.models.llama3.model import Transformer


def plain_training(args: ModelArgs, global_batch: Callable[[int], tuple], *, steps: int, max_norm: float) -> dict:
    """Steps on ``global_batch(step)`` (tokens, labels, document_ids) with whole logits, torch's own cross-entropy, and
    torch's own clipping. Returns the initial weights, the first logits and gradients, and all losses and norms.
    """
    model = Transformer(args)
    init_weights(model, args, seed=0)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = {"initial": initial, "losses": [], "norms": []}
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}]
    groups += [{"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        tokens, labels, document_ids = global_batch(step)
        logits = model(tokens, document_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        if step == 0:
            result["logits"] = logits.detach()
            result["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        result["losses"].append(loss.item())
        result["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return result
