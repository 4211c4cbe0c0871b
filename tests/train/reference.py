"""All objectives written out in NumPy float64, one answer and one token at a time, from the papers' formulas: shares no code with the package.

Lists hold one entry (float64 array over its tokens) per answer. Whatever the formulas hold constant (sg) is evaluated at `held`, a copy of theta that
finite differences do not move.
"""

import numpy as np

DEFAULTS = {  # objective -> old policy, aggregation, low, high
    "decoupled": ("prox", "token", 0.2, 0.2),
    "ppo": ("behav", "token", 0.2, 0.2),
    "grpo": ("behav", "sequence", 0.2, 0.2),
    "dr-grpo": ("behav", "batch", 0.2, 0.2),
    "rloo": ("prox", "sequence-sum", None, None),
    "dapo": ("behav", "token", 0.2, 0.28),
    "gspo": ("behav", "sequence", 3e-4, 4e-4),
    "cispo": ("behav", "token", 1.0, 4.0),
}


def batch_loss(*columns, objective, max_new_tokens, **options):
    """The loss of a mini-batch. `columns`: those of `answer_losses`, each a list over the trained answers."""
    lengths = [len(theta) for theta in columns[0]]
    shares = answer_shares(lengths, options.get("aggregation", DEFAULTS[objective][1]), max_new_tokens)
    return sum(share * answer_losses(*one, objective=objective, **options).sum() for share, one in zip(shares, zip(*columns, strict=True), strict=True))


def answer_shares(lengths, aggregation, max_new_tokens):
    """What the sum of an answer's token losses counts in the loss of the mini-batch."""
    if aggregation == "token":
        return [1 / sum(lengths) for _ in lengths]
    if aggregation == "sequence":
        return [1 / length / len(lengths) for length in lengths]
    if aggregation == "sequence-sum":
        return [1 / len(lengths) for _ in lengths]
    return [1 / max_new_tokens / len(lengths) for _ in lengths]


def answer_losses(theta, held, prox, behav, ref, staleness, advantage, /, *, objective, **options):
    """Loss of each token of one answer."""
    default_old, _, low, high = DEFAULTS[objective]
    low, high = options.get("clip_low", low), options.get("clip_high", high)
    old_policy = options.get("old_policy", default_old)
    if options.get("prox") == "loglinear":
        prox = np.array([(b + s * t) / (s + 1) for b, s, t in zip(behav, staleness, held, strict=True)])
    old = prox if old_policy == "prox" else behav
    mean_log_ratio = (theta - old).sum() / len(theta)
    product = np.exp((prox - behav).sum())
    losses = np.zeros(len(theta))
    for t in range(len(theta)):
        u = np.exp(theta[t] - old[t])
        if objective == "rloo":
            loss = -advantage * theta[t]
        elif objective == "cispo":
            loss = -min(max(np.exp(held[t] - old[t]), 1 - low), 1 + high) * advantage * theta[t]
        else:
            if objective == "gspo":
                u = np.exp(mean_log_ratio)
            gain = min(u * advantage, min(max(u, 1 - low), 1 + high) * advantage)
            if advantage < 0 and "dual_clip" in options:
                gain = max(gain, options["dual_clip"] * advantage)
            loss = -gain
        if old_policy == "prox":
            loss *= weight(product if options.get("behav_level") == "sequence" else np.exp(prox[t] - behav[t]), options)
        if options.get("kl_coef"):
            loss += options["kl_coef"] * penalty(theta[t], held[t], ref[t], options.get("kl_estimator", "k3"))
        losses[t] = loss
    return losses


def weight(ratio, options):
    kind, cap = options.get("behav_weight", "full"), options.get("behav_cap", 2.0)
    if kind == "truncated":
        return min(ratio, cap)
    if kind == "masked":
        return ratio if ratio <= cap else 0.0
    return ratio


def penalty(theta, held, ref, estimator):
    if estimator == "k1":  # value d, gradient that of E[d] by the score function: d * grad log pi
        return (held - ref) + (held - ref) * (theta - held)
    if estimator == "k2":
        return 0.5 * (theta - ref) ** 2
    ratio = np.exp(ref) / np.exp(theta)
    return ratio - np.log(ratio) - 1


def gradient(*columns, objective, max_new_tokens, step=1e-6, **options):
    """d batch_loss / d theta by central differences, an array per answer (an answer's log-probabilities move no other answer's losses)."""
    lengths = [len(theta) for theta in columns[0]]
    shares = answer_shares(lengths, options.get("aggregation", DEFAULTS[objective][1]), max_new_tokens)
    result = []
    for share, (theta, *rest) in zip(shares, zip(*columns, strict=True), strict=True):
        above, below = ([answer_losses(moved, *rest, objective=objective, **options).sum() for moved in theta + s * np.eye(len(theta))] for s in (step, -step))
        result.append(share * (np.array(above) - np.array(below)) / (2 * step))
    return result


# Options of config.Train that between them take every path: each is tried in value, gradient, on ranks and against `transformers`.
CASES = {
    "decoupled": {"objective": "decoupled"},
    "decoupled dual clip": {"objective": "decoupled", "dual_clip": 1.5},
    "decoupled sequence weight": {"objective": "decoupled", "behav_level": "sequence"},
    "decoupled token TIS": {"objective": "decoupled", "behav_weight": "truncated", "behav_cap": 1.2},
    "decoupled sequence TIS": {"objective": "decoupled", "behav_weight": "truncated", "behav_level": "sequence"},
    "decoupled token MIS": {"objective": "decoupled", "behav_weight": "masked", "behav_cap": 1.2},
    "decoupled sequence MIS": {"objective": "decoupled", "behav_weight": "masked", "behav_level": "sequence"},
    "decoupled loglinear": {"objective": "decoupled", "prox": "loglinear", "aggregation": "sequence-sum"},
    "ppo": {"objective": "ppo", "aggregation": "batch"},
    "ppo dual clip": {"objective": "ppo", "dual_clip": 1.4, "clip_high": 0.3},
    "grpo": {"objective": "grpo"},
    "grpo k1": {"objective": "grpo", "kl_coef": 0.3, "kl_estimator": "k1"},
    "grpo k2": {"objective": "grpo", "kl_coef": 0.3, "kl_estimator": "k2"},
    "grpo k3": {"objective": "grpo", "kl_coef": 0.3, "old_policy": "prox"},
    "dr-grpo": {"objective": "dr-grpo"},
    "rloo": {"objective": "rloo"},
    "rloo sequence TIS": {"objective": "rloo", "behav_weight": "truncated", "behav_level": "sequence", "behav_cap": 1.1},
    "dapo": {"objective": "dapo"},
    "gspo": {"objective": "gspo"},
    "gspo wide, token mean": {"objective": "gspo", "clip_low": 0.1, "clip_high": 0.2, "aggregation": "token", "old_policy": "prox"},
    "cispo": {"objective": "cispo"},
    "cispo narrow": {"objective": "cispo", "clip_low": 0.1, "clip_high": 0.2, "old_policy": "prox", "behav_weight": "masked"},
}
