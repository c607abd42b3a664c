#!/usr/bin/env python3
"""Writes the reference cases for preference training: DPO and its relatives, ORPO, SimPO/CPO, KTO.

    pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2 trl==1.16.0 accelerate==1.15.0
    OMP_NUM_THREADS=1 python make_golden_preference.py OUT_DIR --golden tests/golden               # seed 0
    OMP_NUM_THREADS=1 python make_golden_preference.py OUT_DIR --golden holdout/golden --set holdout --seed 7 \
        --tokenizers tests/golden/data/tokenizers
    --only losses,data,llama31/dpo_lora    some parts; --no-trl: without comparing with TRL (losses, runs)
    --torchtune DIR                        an unpacked torchtune 0.6.1 wheel: compares its DPOLoss and RSOLoss too

OUT_DIR/preference/
    losses.json              loss, gradient, rewards for a table of log-probabilities
    data.json                rows -> prompt_ids, chosen_ids, rejected_ids (run through TRL's own code)
    <family>/<variant>/      training runs: adapter_init.safetensors, batches.safetensors, grads_step0.safetensors, steps.json,
                             adapter/ (full: final.safetensors)
    versions.json

The formulas stand here in plain PyTorch, one document at a time, without padding or packing. Each is compared with the code of TRL's
trainers on the same batch (padded, as TRL pads it); the largest differences are written to versions.json and printed.
"""
import argparse, copy, json, math, pathlib, types, warnings, logging, os
os.environ.setdefault("CUDA_VISIBLE_DEVICES", ""); os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
warnings.filterwarnings("ignore"); logging.disable(logging.WARNING)
os.environ.setdefault("HF_HUB_OFFLINE", "1"); os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1"); os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1"); os.environ.setdefault("TQDM_DISABLE", "1")
import torch, torch.nn.functional as F
from safetensors.torch import save_file, load_file
import transformers

# ---------------------------------------------------------------- formulas
def log1mexp(x):
    """log(1 - exp(x)), x <= 0"""
    return torch.where(x < -math.log(2.0), torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))

def pair_loss(kind, p, c, r, rc, rr, nc, nr):
    """Loss per pair. c, r: summed log-probs of the chosen and the rejected response; rc, rr: those of the reference; nc, nr: tokens."""
    b, e = p["beta"], p.get("label_smoothing", 0.0)
    ls = F.logsigmoid
    dc, dr = c - rc, r - rr                        # log ratios
    d = dc - dr
    ac, ar = dc / nc.clamp(min=1), dr / nr.clamp(min=1)
    if kind == "sigmoid": return -ls(b * d)                                            # TRL 1.x: no label smoothing here
    if kind == "sigmoid_smoothed": return -(1 - e) * ls(b * d) - e * ls(-b * d)         # cDPO: torchtune, ms-swift, TRL before 1.0
    if kind == "sigmoid_norm": return -ls(b * (ac - ar))
    if kind == "robust": return (-(1 - e) * ls(b * d) + e * ls(-b * d)) / (1 - 2 * e)
    if kind == "hinge": return torch.relu(1 - b * d)
    if kind == "ipo": return (ac - ar - 1 / (2 * b)) ** 2
    if kind == "ipo_sum": return (d - 1 / (2 * b)) ** 2                                 # the paper's letter; TRL until 0.9
    if kind == "exo_pair": return torch.sigmoid(b * d) * (ls(b * d) - math.log1p(-e)) + torch.sigmoid(-b * d) * (ls(-b * d) - math.log(e))
    if kind == "nca_pair": return -ls(b * dc) - 0.5 * ls(-b * dc) - 0.5 * ls(-b * dr)
    if kind == "bco_pair": return -ls(b * dc) - ls(-b * dr)                             # no running mean in TRL 1.x
    if kind == "sppo_hard": return (dc - 0.5 / b) ** 2 + (dr + 0.5 / b) ** 2
    if kind == "apo_zero": return 1 - torch.sigmoid(b * dc) + torch.sigmoid(b * dr)
    if kind == "apo_down": return torch.sigmoid(b * dc) + 1 - torch.sigmoid(b * d)
    if kind == "discopop":
        m = torch.sigmoid(b * d / p.get("discopop_tau", 0.05)); return -ls(b * d) * (1 - m) + torch.exp(-b * d) * m
    if kind == "aot":                              # sorted over the batch: the loss of a rank, not of a pair
        x = (c - r).sort().values - (rc - rr).sort().values; return -(1 - e) * ls(b * x) - e * ls(-b * x)
    if kind == "aot_unpaired":
        x = dc.sort().values - dr.sort().values; return -(1 - e) * ls(b * x) - e * ls(-b * x)
    # without a reference
    if kind == "cpo": return -(1 - e) * ls(b * (c - r)) - e * ls(-b * (c - r))
    if kind == "cpo_hinge": return torch.relu(1 - b * (c - r))
    if kind == "cpo_ipo": return (c / nc - r / nr - 1 / (2 * b)) ** 2
    if kind == "simpo":
        x = b * (c / nc - r / nr) - p["gamma"]; return -(1 - e) * ls(x) - e * ls(-x)
    if kind == "orpo":                             # the odds ratio term alone, lambda = beta
        x, y = c / nc, r / nr; return -b * ls((x - y) - (log1mexp(x) - log1mexp(y)))
    raise KeyError(kind)

NO_REF = {"cpo", "cpo_hinge", "cpo_ipo", "simpo", "orpo"}
AVERAGE = {"cpo_ipo", "simpo", "orpo"}             # their rewards are beta times the MEAN log-prob

def rewards(kind, p, c, r, rc, rr, nc, nr):
    if kind in AVERAGE: return p["beta"] * c / nc, p["beta"] * r / nr
    if kind in NO_REF: return p["beta"] * c, p["beta"] * r
    return p["beta"] * (c - rc), p["beta"] * (r - rr)

def kto_loss(p, lp, ref, label, kl):
    x = p["beta"] * (lp - ref - kl)
    if p.get("loss") == "apo_zero_unpaired": x = p["beta"] * (lp - ref)
    return torch.where(label, p["desirable_weight"] * (1 - torch.sigmoid(x)), p["undesirable_weight"] * (1 - torch.sigmoid(-x)))

# ---------------------------------------------------------------- losses.json
ROWS = [  # name, chosen, rejected, ref chosen, ref rejected, chosen tokens, rejected tokens, prompt log-prob, predicted prompt tokens
    ("typical", -42.3125, -45.125, -43.5, -44.0, 12, 17, -61.25, 23),
    ("rejected_preferred", -38.75, -30.5, -35.25, -33.125, 9, 8, -20.5, 11),
    ("both_down", -80.0, -95.0, -60.0, -70.0, 30, 22, -14.0, 5),
    ("both_up", -20.0, -24.0, -31.0, -30.0, 10, 11, -18.0, 6),
    ("policy_is_reference", -55.5, -47.25, -55.5, -47.25, 14, 14, -33.0, 12),
    ("identical_responses", -12.5, -12.5, -13.0, -13.0, 5, 5, -7.0, 3),
    ("tie_of_rewards", -30.0, -40.0, -32.0, -42.0, 8, 16, -10.0, 4),
    ("very_uneven_lengths", -2.25, -610.0, -2.5, -600.0, 1, 256, -40.0, 15),
    ("long_chosen", -512.5, -1.5, -500.0, -1.25, 300, 2, -3.0, 1),
    ("beta_delta_is_one", -40.0, -50.0, -45.0, -45.0, 10, 10, -25.0, 10),
    ("margin_plus_800", -100.0, -900.0, -500.0, -500.0, 64, 64, -50.0, 20),
    ("margin_minus_5000", -3000.0, -10.0, -500.0, -2510.0, 400, 40, -50.0, 20),
    ("near_certain", -0.0009765625, -0.0001220703125, -0.5, -0.25, 4, 4, -9.0, 3),
    ("very_certain", -0.00021, -0.0007, -0.125, -0.75, 3, 2, -9.0, 3),
    ("certain_chosen", 0.0, -3.0, -1.0, -2.0, 2, 2, -9.0, 3),
    ("tiny_difference", -1000.0009765625, -1000.0, -1000.0, -1000.0, 100, 100, -50.0, 20),
    ("empty_rejected", -8.0, 0.0, -9.0, 0.0, 4, 0, -5.0, 2),
]
def holdout_rows():
    g = torch.Generator().manual_seed(7); u = lambda a, b: int(torch.randint(a, b, (1,), generator=g))
    rows = []
    for i in range(12):
        nc, nr = u(1, 40), u(1, 40); c, r = -nc * u(4, 90) / 16, -nr * u(4, 90) / 16
        rows.append((f"random_{i}", c, r, c + u(-200, 200) / 16, r + u(-200, 200) / 16, nc, nr, -u(1, 1000) / 16, u(1, 30)))
    return rows + [("margin_minus_1200", -900.0, -100.0, -300.0, -700.0, 77, 31, -20.0, 9), ("margin_plus_3000", -100.0, -2000.0, -1100.0, -0.5, 20, 200, -20.0, 9), ("near_certain", -0.00021, -0.0007, -0.125, -0.75, 3, 2, -9.0, 3), ("tie_of_rewards", -7.5, -9.5, -6.5, -8.5, 3, 4, -2.0, 1), ("beta_delta_is_one", -30.0, -50.0, -40.0, -40.0, 10, 10, -25.0, 10)]

def holdout_loss_cases():
    for k in ("sigmoid", "hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "ipo", "sigmoid_norm", "cpo", "orpo"):
        for b in (0.05, 0.7): yield k, dict(beta=b)
    for k in ("sigmoid_smoothed", "robust", "exo_pair", "cpo"): yield k, dict(beta=0.35, label_smoothing=0.2)
    yield "discopop", dict(beta=0.05, discopop_tau=0.1); yield "simpo", dict(beta=1.5, gamma=0.3); yield "simpo", dict(beta=10.0, gamma=3.0)

def loss_cases():
    for b in (0.1, 0.5): yield "sigmoid", dict(beta=b)
    for b, e in ((0.1, 0.1), (0.5, 0.25)): yield "sigmoid_smoothed", dict(beta=b, label_smoothing=e)
    yield "sigmoid_norm", dict(beta=2.0)
    yield "robust", dict(beta=0.1, label_smoothing=0.1); yield "robust", dict(beta=0.5, label_smoothing=0.3); yield "robust", dict(beta=0.1, label_smoothing=0.0)
    for b in (0.1, 0.03): yield "hinge", dict(beta=b)
    for b in (0.1, 0.6): yield "ipo", dict(beta=b)
    yield "ipo_sum", dict(beta=0.1)
    for e in (0.1, 1e-3): yield "exo_pair", dict(beta=0.1, label_smoothing=e)
    for k in ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down"): yield k, dict(beta=0.1)
    yield "sppo_hard", dict(beta=0.4); yield "apo_zero", dict(beta=0.5)
    yield "discopop", dict(beta=0.1, discopop_tau=0.05); yield "discopop", dict(beta=0.1, discopop_tau=0.5)
    yield "cpo", dict(beta=0.1); yield "cpo", dict(beta=0.1, label_smoothing=0.1)
    yield "cpo_hinge", dict(beta=0.1); yield "cpo_ipo", dict(beta=0.1)
    yield "simpo", dict(beta=2.0, gamma=1.0); yield "simpo", dict(beta=2.5, gamma=0.55); yield "simpo", dict(beta=2.0, gamma=0.5, label_smoothing=0.1)
    yield "orpo", dict(beta=0.1); yield "orpo", dict(beta=1.0)

TRL_LINE = {"sigmoid": "dpo_trainer.py:1387", "sigmoid_smoothed": None, "sigmoid_norm": "dpo_trainer.py:1504", "robust": "dpo_trainer.py:1428", "hinge": "dpo_trainer.py:1390",
    "ipo": "dpo_trainer.py:1393", "ipo_sum": None, "exo_pair": "dpo_trainer.py:1406", "nca_pair": "dpo_trainer.py:1419", "bco_pair": "dpo_trainer.py:1433",
    "sppo_hard": "dpo_trainer.py:1438", "aot": "dpo_trainer.py:1447", "aot_unpaired": "dpo_trainer.py:1458", "apo_zero": "dpo_trainer.py:1467", "apo_down": "dpo_trainer.py:1475",
    "discopop": "dpo_trainer.py:1483", "cpo": "cpo_trainer.py:723", "cpo_hinge": "cpo_trainer.py:729", "cpo_ipo": "cpo_trainer.py:731", "simpo": "cpo_trainer.py:715",
    "orpo": "orpo_trainer.py:693", "kto": "kto_trainer.py:1451", "apo_zero_unpaired": "kto_trainer.py:1454"}

def num(x):
    x = float(x); return x if math.isfinite(x) else ("nan" if x != x else "inf" if x > 0 else "-inf")

class Stub:
    """Stands for accelerator and trainer where TRL's loss code runs without a model."""
    device = torch.device("cpu")
    def gather(self, x): return x
    def gather_for_metrics(self, x): return x

def trl_dpo(kinds, weights, p, c, r, rc, rr, nc, nr):
    """TRL's DPOTrainer._compute_loss on given log-probs: returns loss, gradients to c and r. A response of n tokens gets c/n on each."""
    from trl.trainer.dpo_trainer import DPOTrainer
    from collections import defaultdict
    n = torch.cat([nc, nr]).long(); T = int(n.max()) + 1; B = len(c)
    mask = (torch.arange(T)[None] >= 1) & (torch.arange(T)[None] <= n[:, None])
    tot = torch.cat([c, r]).detach()
    per = torch.where(mask[:, 1:], (tot / n.clamp(min=1))[:, None], torch.zeros((), dtype=tot.dtype)).clone().requires_grad_(True)
    zero = torch.zeros_like(per).detach()
    out = types.SimpleNamespace(log_probs=per, entropy=zero, mean_logits=zero, is_top1=zero.bool())
    t = types.SimpleNamespace(model=types.SimpleNamespace(training=True), accelerator=Stub(), aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True,
        f_divergence_type="reverse_kl", beta=p["beta"], loss_types=kinds, loss_weights=weights, label_smoothing=p.get("label_smoothing", 0.0), use_weighting=False,
        args=types.SimpleNamespace(discopop_tau=p.get("discopop_tau", 0.05)), _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1)
    loss = DPOTrainer._compute_loss(t, lambda **k: out, dict(input_ids=torch.zeros(2 * B, T, dtype=torch.long), attention_mask=mask.long(),
        completion_mask=mask.long(), ref_chosen_logps=rc, ref_rejected_logps=rr), False)
    loss.backward()
    g = per.grad[:, 0] if T > 1 else torch.zeros(2 * B)
    return loss.detach(), g[:B], g[B:], {k: v[-1] for k, v in t._metrics["train"].items()}

def trl_noref(kind, p, c, r, nc, nr):
    c, r = c.detach().requires_grad_(True), r.detach().requires_grad_(True)
    a = kind in AVERAGE
    x, y = (c / nc, r / nr) if a else (c, r)
    if kind == "orpo":
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer
        losses, rwc, rwr, _, _ = ORPOTrainer.odds_ratio_loss(types.SimpleNamespace(beta=p["beta"], accelerator=Stub()), x, y); losses = -losses
    else:
        from trl.experimental.cpo.cpo_trainer import CPOTrainer
        t = types.SimpleNamespace(alpha=0.0, beta=p["beta"], label_smoothing=p.get("label_smoothing", 0.0), accelerator=Stub(), simpo_gamma=p.get("gamma", 0.0),
            loss_type={"cpo": "sigmoid", "cpo_hinge": "hinge", "cpo_ipo": "ipo", "simpo": "simpo"}[kind])
        losses, rwc, rwr = CPOTrainer.cpo_loss(t, x, y)
    losses.mean().backward()
    return losses.mean().detach(), c.grad, r.grad

def trl_kto(p, lp, ref, label, pol_kl, ref_kl):
    from trl.trainer.kto_trainer import KTOTrainer
    from collections import defaultdict
    B = len(lp); per = lp.detach()[:, None].clone().requires_grad_(True); zero = torch.zeros_like(per).detach()
    out = types.SimpleNamespace(log_probs=per, entropy=zero, mean_logits=zero)
    t = types.SimpleNamespace(model=types.SimpleNamespace(training=True), accelerator=Stub(), aux_loss_enabled=False, precompute_ref_logps=True, calculate_KL=p["loss"] == "kto",
        beta=p["beta"], loss_type=p["loss"], desirable_weight=p["desirable_weight"], undesirable_weight=p["undesirable_weight"], _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0, _tp_size=1, _compute_kl_logps=lambda m, b: pol_kl)
    m = torch.ones(B, 2, dtype=torch.long)
    loss = KTOTrainer._compute_loss(t, lambda **k: out, dict(input_ids=m * 0, attention_mask=m, completion_mask=m, label=label, ref_logps=ref, ref_KL_logps=ref_kl), False)
    loss.backward(); return loss.detach(), per.grad[:, 0], t._metrics["train"]["kl"][-1]

def near(a, b):
    """largest |a - b| / max(1, |b|); equal infinities and NaNs count as equal"""
    a, b = torch.as_tensor(a, dtype=torch.float64).reshape(-1), torch.as_tensor(b, dtype=torch.float64).reshape(-1)
    same = (a == b) | (a.isnan() & b.isnan())
    d = torch.where(same, 0.0, (a - b).abs() / b.abs().clamp(min=1.0)); return float(torch.nan_to_num(d, nan=9e9).max())

def losses_json(path, which, check, torchtune, worst):
    ROWS, cases, names, B = (globals()["ROWS"], loss_cases(), ["typical", "rejected_preferred", "both_down", "both_up", "tie_of_rewards"], 0.1) if which == "main" else (holdout_rows(), holdout_loss_cases(), [f"random_{i}" for i in range(7)], 0.3)
    t = lambda i, rows, dt=torch.float64: torch.tensor([float(x[i]) for x in rows], dtype=dt)
    cols = lambda rows, dt=torch.float64: [t(i, rows, dt) for i in range(1, 7)]
    out = {"rows": [dict(zip(("name", "chosen_logp", "rejected_logp", "ref_chosen_logp", "ref_rejected_logp", "chosen_len", "rejected_len", "prompt_logp", "prompt_predicted"), r)) for r in ROWS],
           "cases": [], "batches": [], "kto": []}
    tt = None
    if torchtune:
        import importlib.util
        spec = importlib.util.spec_from_file_location("tt_dpo", pathlib.Path(torchtune) / "torchtune/rlhf/loss/dpo.py"); tt = importlib.util.module_from_spec(spec); spec.loader.exec_module(tt)
    for kind, p in cases:
        rows = []
        for row in ROWS:
            def one(dt):
                c, r, rc, rr, nc, nr = cols([row], dt); c.requires_grad_(True); r.requires_grad_(True)
                l = pair_loss(kind, p, c, r, rc, rr, nc, nr); gc, gr = torch.autograd.grad(l.sum(), (c, r), allow_unused=True)
                z = torch.zeros_like(c); w = rewards(kind, p, c.detach(), r.detach(), rc, rr, nc, nr)
                return l.detach(), z if gc is None else gc, z if gr is None else gr, w
            l, gc, gr, (wc, wr) = one(torch.float64)
            e = dict(row=row[0], loss=num(l), grad_chosen=num(gc), grad_rejected=num(gr), chosen_reward=num(wc), rejected_reward=num(wr), margin=num(wc - wr), accuracy=float(wc > wr))
            f = one(torch.float32)
            naive = {k: num(v) for k, v in (("loss", f[0]), ("grad_chosen", f[1]), ("grad_rejected", f[2])) if not isinstance(num(v), float) and isinstance(e[k], float)}
            if naive: e["naive_f32"] = naive       # what the formula gives if evaluated as written in f32
            rows.append(e)
            if check and TRL_LINE[kind]:
                c, r, rc, rr, nc, nr = cols([row])
                if kind in NO_REF: tl, tc, tr = trl_noref(kind, p, c, r, nc, nr)
                else: tl, tc, tr, _ = trl_dpo([kind], [1.0], p, c, r, rc, rr, nc, nr)
                if nr.item() == 0 and kind not in NO_REF: tr = gr      # TRL has no token there to carry a gradient
                worst["losses"] = max(worst.get("losses", 0), *(w := [near(tl, l), near(tc, gc), near(tr, gr)]))
                lim = 2e-5 if kind in ("orpo", "exo_pair") else 1e-9   # TRL goes through f32 there
                if max(w) > lim: print("  TRL differs:", kind, p, row[0], w, tl, l, tc, gc, tr, gr)
            if tt and kind in ("sigmoid_smoothed", "sigmoid", "hinge"):
                c, r, rc, rr, nc, nr = cols([row])
                f = tt.RSOLoss(p["beta"]) if kind == "hinge" else tt.DPOLoss(p["beta"], p.get("label_smoothing", 0.0))
                a = f(c, r, rc, rr); worst["losses_torchtune"] = max(worst.get("losses_torchtune", 0), near(a[0], l), near(a[1], wc), near(a[2], wr))
        out["cases"].append(dict(loss=kind, **p, trl=TRL_LINE[kind], rows=rows))
    # losses that tie the pairs of a batch together
    rows = [r for r in ROWS if r[0] in names]
    def batch(kinds, weights, p, nll_scope=None):
        c, r, rc, rr, nc, nr = cols(rows); c.requires_grad_(True); r.requires_grad_(True)
        nll = -(c + (t(7, rows) if nll_scope == "full" else 0)).sum() / (nc + (t(8, rows) if nll_scope == "full" else 0)).sum()
        per = [nll.expand(len(rows)) if k == "nll" else pair_loss(k, p, c, r, rc, rr, nc, nr) for k in kinds]
        loss = sum(w * x.mean() for w, x in zip(weights, per)); gc, gr = torch.autograd.grad(loss, (c, r), allow_unused=True); gr = torch.zeros_like(gc) if gr is None else gr
        out["batches"].append(dict(terms=[dict(loss=k, weight=w) for k, w in zip(kinds, weights)], **p, **({"nll_tokens": nll_scope or "response"} if "nll" in kinds else {}),
            trl=[{"nll": "dpo_trainer.py:1495"}.get(k) or TRL_LINE[k] for k in kinds], rows=names, mean_loss=num(loss), nll=num(nll) if "nll" in kinds else None,
            per_rank=[num(x) for x in per[0].detach()] if kinds[0].startswith("aot") else None, grad_chosen=[num(x) for x in gc], grad_rejected=[num(x) for x in gr]))
        if check and not set(kinds) & NO_REF:
            tl, tc, tr, _ = trl_dpo(["sft" if k == "nll" else k for k in kinds], weights, p, c.detach(), r.detach(), rc, rr, nc, nr)
            w = max(near(tl, loss.detach()), near(tc, gc), near(tr, gr)); worst["losses"] = max(worst["losses"], w)
            if w > 1e-9: print("  TRL differs:", kinds, w)
    for e in (0.0, 0.1): batch(["aot"], [1.0], dict(beta=B, label_smoothing=e)); batch(["aot_unpaired"], [1.0], dict(beta=B, label_smoothing=e))
    batch(["sigmoid"], [1.0], dict(beta=B)); batch(["nll"], [1.0], dict(beta=B))
    batch(["sigmoid", "nll"], [1.0, 0.5], dict(beta=B)); batch(["ipo", "nll"], [1.0, 1.0], dict(beta=B)); batch(["sigmoid", "bco_pair", "nll"], [0.8, 0.2, 1.0], dict(beta=B))
    batch(["orpo", "nll"], [1.0, 1.0], dict(beta=B), "full"); batch(["orpo", "nll"], [1.0, 1.0], dict(beta=B)); batch(["cpo", "nll"], [1.0, 1.0], dict(beta=B)); batch(["simpo", "nll"], [1.0, 0.3], dict(beta=2.0, gamma=0.5))
    # KTO
    lp, ref = [-42.3125, -38.75, -80.0, -20.0, -30.0, -5000.0], [-43.5, -35.25, -60.0, -31.0, -32.0, -12.0]; lab = [True, False, True, False, True, False]
    kls = {"positive": ([-40.0, -50.5, -61.0, -12.0, -33.0, -70.0], [-44.0, -51.0, -70.0, -11.5, -36.0, -70.25]), "negative": ([-44.0, -51.0, -70.0, -11.5, -36.0, -70.25], [-40.0, -50.5, -61.0, -12.0, -33.0, -70.0])}
    for name, idx, kl, p in (("mixed", range(6), "positive", {}), ("mixed, negative estimate counts as 0", range(6), "negative", {}), ("weights", range(6), "positive", dict(desirable_weight=1.5, undesirable_weight=0.75)),
                             ("only desirable", (0, 2, 4), "positive", {}), ("only undesirable", (1, 3, 5), "positive", {}), ("one example", (3,), "positive", {}), ("large beta", range(5), "positive", dict(beta=0.5)),
                             ("apo_zero_unpaired", range(6), "positive", dict(loss="apo_zero_unpaired"))):
        p = dict(loss="kto", beta=B, desirable_weight=1.0, undesirable_weight=1.0) | p; f = lambda x: torch.tensor([float(x[i]) for i in idx], dtype=torch.float64)
        x, y, l = f(lp).requires_grad_(True), f(ref), torch.tensor([lab[i] for i in idx]); pk, rk = f(kls[kl][0]), f(kls[kl][1])
        est = (pk - rk).mean().clamp(min=0.0) if p["loss"] == "kto" else torch.zeros((), dtype=torch.float64)
        per = kto_loss(p, x, y, l, est); (g,) = torch.autograd.grad(per.mean(), x)
        out["kto"].append(dict(name=name, **p, trl=TRL_LINE[p["loss"]], logp=f(lp).tolist(), ref_logp=y.tolist(), desirable=l.tolist(), kl_logp=pk.tolist(), kl_ref_logp=rk.tolist(), kl=num(est),
            losses=[num(v) for v in per.detach()], mean_loss=num(per.mean()), grad=[num(v) for v in g], rewards=[num(v) for v in p["beta"] * (x.detach() - y)]))
        if check:
            tl, tg, tk = trl_kto(p, x, y, l, pk, rk); w = max(near(tl, per.mean().detach()), near(tg, g), near(tk, est)); worst["losses"] = max(worst["losses"], w)
            if w > 1e-9: print("  TRL differs: kto", name, w)
    path.write_text(json.dumps(out, indent=0))

# ---------------------------------------------------------------- training runs
ATTN = ["q_proj", "v_proj"]
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = dict(r=4, lora_alpha=8, target_modules=ATTN)
# micro: pairs (KTO: examples) in each micro-batch of each optimizer step
UNEVEN = [[3, 1], [1, 2], [2, 2, 1], [4], [1, 3]]
RUNS = {
    "main": [
        ("llama31", "dpo_lora", dict(terms=[("sigmoid", 1.0)], beta=0.3), LORA, dict(micro=UNEVEN, empty_prompt=True)),
        ("llama31", "dpo_lora_continued", dict(terms=[("sigmoid", 1.0)], beta=0.5), LORA, dict(micro=UNEVEN, reference="adapter_init", warmup=1)),
        ("llama31", "dpo_full", dict(terms=[("sigmoid", 1.0)], beta=0.1), None, dict(micro=UNEVEN, lr=2e-3, weight_decay=0.01, warmup=1, eps=1e-6)),
        ("llama31", "dpo_smoothed_lora", dict(terms=[("sigmoid_smoothed", 1.0)], beta=0.3, label_smoothing=0.1), LORA, dict(micro=UNEVEN)),
        ("llama31", "robust_lora", dict(terms=[("robust", 1.0)], beta=0.3, label_smoothing=0.2), LORA, dict(micro=UNEVEN)),
        ("llama31", "hinge_lora", dict(terms=[("hinge", 1.0)], beta=0.75), LORA, dict(micro=UNEVEN)),
        ("llama31", "rpo_lora", dict(terms=[("sigmoid", 1.0), ("nll", 0.5)], beta=0.3), LORA, dict(micro=UNEVEN)),
        ("llama31", "ipo_lora", dict(terms=[("ipo", 1.0)], beta=0.4), LORA, dict(micro=UNEVEN)),
        ("llama31", "orpo_lora", dict(terms=[("orpo", 1.0), ("nll", 1.0)], beta=2.0, nll_tokens="full"), LORA, dict(micro=UNEVEN, empty_prompt=True, likely=True)),
        ("llama31", "simpo_lora", dict(terms=[("simpo", 1.0)], beta=2.0, gamma=1.0), LORA, dict(micro=UNEVEN, empty_prompt=True)),
        ("llama31", "kto_lora", dict(terms=[("kto", 1.0)], beta=0.4, desirable_weight=1.25, undesirable_weight=0.75, kl="micro_batch"), LORA, dict(micro=[[4, 2], [1, 3], [3, 3, 1], [5], [2, 4]], seed=7)),
        ("llama31", "kto_step_kl_lora", dict(terms=[("kto", 1.0)], beta=0.4, desirable_weight=1.25, undesirable_weight=0.75, kl="step"), LORA, dict(micro=[[4, 2], [1, 3], [3, 3, 1], [5], [2, 4]], seed=7)),
        ("qwen2", "dpo_lora", dict(terms=[("sigmoid", 1.0)], beta=0.2), dict(r=8, lora_alpha=16, target_modules=EVERY, use_rslora=True), dict(micro=[[2, 3], [1, 1, 1], [5], [2, 1], [1, 4], [3, 2]])),
    ],
    "holdout": [
        ("mistral", "dpo_lora", dict(terms=[("sigmoid", 1.0)], beta=0.15), dict(r=4, lora_alpha=8, target_modules=EVERY), dict(micro=[[1, 4], [3], [2, 2, 2], [1, 1], [4, 1]], empty_prompt=True, long=True)),
        ("mistral", "robust_lora", dict(terms=[("robust", 1.0)], beta=0.25, label_smoothing=0.2), LORA, dict(micro=[[1, 4], [3], [2, 2, 2], [1, 1], [4, 1]], long=True)),
        ("mistral", "hinge_lora", dict(terms=[("hinge", 1.0)], beta=0.5), LORA, dict(micro=UNEVEN, long=True)),
        ("gemma2", "simpo_lora", dict(terms=[("simpo", 1.0)], beta=2.5, gamma=1.375), LORA, dict(micro=[[2, 1], [1, 3], [5], [1, 1, 2]], empty_prompt=True, long=True)),
        ("gemma2", "orpo_lora", dict(terms=[("orpo", 1.0), ("nll", 1.0)], beta=1.5, nll_tokens="full"), LORA, dict(micro=[[2, 1], [1, 3], [5], [1, 1, 2]], long=True, likely=True)),
        ("gemma2", "apo_zero_lora", dict(terms=[("apo_zero", 1.0)], beta=0.35), LORA, dict(micro=UNEVEN)),
        ("qwen3", "dpo_full", dict(terms=[("sigmoid", 1.0)], beta=0.25), None, dict(micro=UNEVEN[1:] + [[2, 1]], lr=2e-3, weight_decay=0.02, warmup=1, eps=1e-6)),
        ("qwen3", "ipo_lora", dict(terms=[("ipo", 1.0)], beta=0.25), LORA, dict(micro=[[1, 2, 1], [4, 2], [1, 3], [2], [3, 1]])),
        ("qwen3", "kto_lora", dict(terms=[("kto", 1.0)], beta=0.25, desirable_weight=0.8, undesirable_weight=1.3, kl="micro_batch"), LORA, dict(micro=[[3, 4], [2, 1], [6], [1, 2, 3], [4, 2]], seed=4)),
        ("qwen3", "rpo_lora", dict(terms=[("sigmoid", 1.0), ("nll", 1.5)], beta=0.05), LORA, dict(micro=UNEVEN)),
        ("qwen3", "dpo_smoothed_lora", dict(terms=[("sigmoid_smoothed", 1.0)], beta=0.2, label_smoothing=0.3), dict(r=8, lora_alpha=16, target_modules=EVERY), dict(micro=UNEVEN)),
        ("qwen3", "dpo_lora_continued", dict(terms=[("sigmoid", 1.0)], beta=0.4), LORA, dict(micro=UNEVEN[1:], reference="adapter_init", warmup=1)),
    ],
}
EOS = 2

def make_batches(terms, o, vocab, g):
    """step -> micro-batch -> list of items. Pair: prompt, chosen, rejected. KTO: prompt, response, desirable, kl (a foreign response)."""
    ri = lambda a, b: int(torch.randint(a, b, (1,), generator=g)); toks = lambda n: torch.randint(3, vocab, (n,), generator=g).tolist()
    long, kto = o.get("long"), terms[0][0] == "kto"
    steps, count = [], 0
    for s, micro in enumerate(o["micro"]):
        step = []
        for m in micro:
            mb = []
            for _ in range(m):
                prompt = toks(ri(1, 20 if long else 13)); resp = lambda: toks(ri(1, 22 if long else 14)) + [EOS]
                chosen, rejected = resp(), resp()
                if count % 4 == 1: k = min(3, len(chosen) - 1, len(rejected) - 1); rejected[:k] = chosen[:k]      # responses that start alike
                if count == 2: rejected = list(chosen)                                                          # the same response twice
                if count == 3: rejected = [EOS]                                                                # an empty response is its end token
                if count == 5: chosen = chosen[:-1] + [7]                                                       # cut off: no end token
                if count == 6 and o.get("empty_prompt"): prompt = []                                             # the first response token is not predicted
                if kto: mb.append(dict(prompt=prompt, response=chosen, desirable=bool(ri(0, 2))))
                else: mb.append(dict(prompt=prompt, chosen=chosen, rejected=rejected))
                count += 1
            step.append(mb)
        if kto:                                    # KL: each prompt with the response of the example before it, the first with the last (TRL's rotation)
            for group in ([[x for mb in step for x in mb]] if o["kl"] == "step" else step):
                for i, x in enumerate(group): x["kl"] = group[i - 1]["response"]
        steps.append(step)
    return steps

def token_logps(model, prompt, response):
    """log p of each predicted token of prompt + response (from the second token on), and which of them belong to the response"""
    ids = torch.tensor([prompt + response]); lp = F.log_softmax(model(input_ids=ids).logits[0, :-1].to(torch.promote_types(torch.float32, model.dtype)), -1)
    per = lp.gather(1, ids[0, 1:, None])[:, 0]
    return per, torch.arange(1, ids.shape[1]) >= len(prompt)

def seq(model, prompt, response):
    per, inside = token_logps(model, prompt, response); return per[inside].sum(), int(inside.sum()), per

def step_loss(model, ref, step, p, dtype, backward=True):
    """The loss of one optimizer step: pair terms are averaged over its pairs, the nll over its tokens, whatever the split in micro-batches."""
    main, terms = p["terms"][0][0], p["terms"]; items = [x for mb in step for x in mb]; N = len(items)
    kto = main == "kto"; info = []
    T = lambda x: torch.as_tensor(x, dtype=dtype)
    if kto:
        kls = []
        for group in ([items] if p["kl"] == "step" else step):
            with torch.no_grad():
                est = torch.stack([seq(model, x["prompt"], x["kl"])[0] for x in group])
            rest = T([ref(x["prompt"], x["kl"]) for x in group]); kls += [((est - rest).mean().clamp(min=0), est, rest)] * (len(step) if p["kl"] == "step" else 1)
        total = 0.0
        for mb, (kl, _, _) in zip(step, kls):
            for x in mb:
                lp, n, _ = seq(model, x["prompt"], x["response"]); rf = T(ref(x["prompt"], x["response"]))
                l = kto_loss(p | dict(loss="kto"), lp, rf, torch.tensor(x["desirable"]), kl)
                if backward: (l / N).backward()
                total += l.item() / N; info.append(dict(logp=lp.item(), ref_logp=rf.item(), desirable=x["desirable"], tokens=n, loss=l.item(), reward=p["beta"] * (lp.item() - rf.item())))
        groups = [kls[0]] if p["kl"] == "step" else kls
        w = lambda d: [i["reward"] for i in info if i["desirable"] == d]; mean = lambda v: sum(v) / len(v) if v else None
        return dict(loss=total, kl=[k[0].item() for k in kls], kl_raw=[(k[1] - k[2]).mean().item() for k in groups], kl_logps=[k[1].tolist() for k in groups], kl_ref_logps=[k[2].tolist() for k in groups],
                    reward_desirable=mean(w(True)), reward_undesirable=mean(w(False)), examples=info)
    nll_full = p.get("nll_tokens") == "full"; has_nll = any(k == "nll" for k, _ in terms)
    tokens = sum((len(x["prompt"]) + len(x["chosen"]) - 1) if nll_full else len(x["chosen"]) - (not x["prompt"]) for x in items) if has_nll else None
    total, nll_total, acc = 0.0, 0.0, []
    for x in items:
        c, nc, per = seq(model, x["prompt"], x["chosen"]); r, nr, _ = seq(model, x["prompt"], x["rejected"])
        rc, rr = (T(ref(x["prompt"], x["chosen"])), T(ref(x["prompt"], x["rejected"]))) if main not in NO_REF else (T(0.0), T(0.0))
        args = (p, c[None], r[None], rc[None], rr[None], T([float(nc)]), T([float(nr)])); loss = torch.zeros((), dtype=dtype); own = {}
        for k, w in terms:
            if k == "nll": v = -(per.sum() if nll_full else c) / tokens; nll_total += v.item(); loss = loss + w * v
            else: v = pair_loss(k, *args)[0]; own[k] = v.item(); loss = loss + w * v / N
        if backward: loss.backward()
        total += loss.item(); wc, wr = (float(v) for v in rewards(main, *[a.detach() if torch.is_tensor(a) else a for a in args]))
        i = dict(chosen_logp=c.item(), rejected_logp=r.item(), chosen_tokens=nc, rejected_tokens=nr, chosen_reward=wc, rejected_reward=wr, margin=wc - wr, accuracy=float(wc > wr), loss=own[main])
        if main not in NO_REF: i |= dict(ref_chosen_logp=rc.item(), ref_rejected_logp=rr.item())
        info.append(i)
    mean = lambda k: sum(i[k] for i in info) / N
    return dict(loss=total, **(dict(nll=nll_total, nll_token_count=tokens) if has_nll else {}), chosen_reward=mean("chosen_reward"), rejected_reward=mean("rejected_reward"), margin=mean("margin"), accuracy=mean("accuracy"), pairs=info)

def pack(items, kto):
    """One row of documents, pair after pair, chosen before rejected; labels -100 on the prompt, not shifted."""
    docs = [(x["prompt"], x["response"]) for x in items] if kto else [d for x in items for d in ((x["prompt"], x["chosen"]), (x["prompt"], x["rejected"]))]
    t = lambda v: torch.tensor(v, dtype=torch.int64)
    def flat(docs): return dict(input_ids=t([sum((p + r for p, r in docs), [])]), labels=t([sum(([-100] * len(p) + r for p, r in docs), [])]),
        position_ids=t([sum((list(range(len(p + r))) for p, r in docs), [])]), document_lengths=t([len(p + r) for p, r in docs]), prompt_lengths=t([len(p) for p, r in docs]))
    out = flat(docs)
    if kto: out |= {"kl." + k: v for k, v in flat([(x["prompt"], x["kl"]) for x in items]).items()} | {"desirable": t([int(x["desirable"]) for x in items])}
    return out

def run_case(out, ckpt, seed, p, lora, o, check, worst, name):
    from peft import LoraConfig, get_peft_model
    from transformers import get_cosine_schedule_with_warmup, AutoModelForCausalLM
    kto = p["terms"][0][0] == "kto"; o = dict(lr=1e-2, weight_decay=0.1, eps=1e-8, warmup=2) | o | ({"kl": p["kl"]} if kto else {})
    n = len(o["micro"]); seed = seed + o.get("seed", 0)
    base = lambda dt=torch.float32: AutoModelForCausalLM.from_pretrained(ckpt, dtype=dt, attn_implementation="eager").eval()
    vocab = base().config.vocab_size
    saved = lambda k: k.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")
    def build(dt):
        m = base(dt)
        if lora is None: return m
        torch.manual_seed(0); m = get_peft_model(m, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **lora), autocast_adapter_dtype=False)
        g = torch.Generator().manual_seed(seed + 103)
        with torch.no_grad():
            for k, q in m.named_parameters():
                if q.requires_grad: q.copy_(torch.randn(q.shape, generator=g) * (0.05 if lora["target_modules"] == ATTN else 0.03))   # B too: policy and reference differ from step 0 on
        return m.eval()
    batches = make_batches(p["terms"], o, vocab, torch.Generator().manual_seed(seed + 104))
    if o.get("likely"):                            # responses the model itself would give: log-probs near 0, where the odds matter
        with torch.no_grad():
            probe = base()
            def greedy(ids, k):
                ids = list(ids)
                for _ in range(k): ids.append(int(probe(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
                return ids[-k:]
            items = [x for step in batches for mb in step for x in mb]
            for i, x in enumerate(items):
                if x["prompt"] and i % 3 < 2: x["chosen" if i % 3 == 0 else "rejected"] = greedy(x["prompt"], 1 + i % 2)
    def train(dt, clip, dump=None):
        """dump: folder to write to"""
        model = build(dt); frozen = build(dt) if o.get("reference") == "adapter_init" else base(dt); frozen.requires_grad_(False)
        memo = {}
        def ref(prompt, response):                 # the reference: the checkpoint itself (LoRA: the adapter switched off), or with the adapter it starts from
            k = (tuple(prompt), tuple(response))
            if k not in memo:
                with torch.no_grad(): memo[k] = seq(frozen, prompt, response)[0].item()
            return memo[k]
        named = [(saved(k), q) for k, q in model.named_parameters() if q.requires_grad]; params = [q for _, q in named]
        if dump and lora is not None: save_file({k: q.detach().clone().contiguous() for k, q in named}, dump / "adapter_init.safetensors")
        opt = torch.optim.AdamW(params, lr=o["lr"], betas=(0.9, 0.999), eps=o["eps"], weight_decay=o["weight_decay"])
        sched = get_cosine_schedule_with_warmup(opt, num_warmup_steps=o["warmup"], num_training_steps=n)
        log, g0 = [], None
        for s, step in enumerate(batches):
            info = step_loss(model, ref, step, p, dt)
            if s == 0: g0 = {k: q.grad.detach().clone().contiguous() for k, q in named}
            norm = torch.nn.utils.clip_grad_norm_(params, clip).item(); lr = sched.get_last_lr()[0]
            opt.step(); sched.step(); opt.zero_grad()
            log.append(dict(step=s, micro_batches=[len(mb) for mb in step]) | {k: v for k, v in info.items() if k not in ("pairs", "examples")} | dict(grad_norm=norm, lr=lr) | {k: v for k, v in info.items() if k in ("pairs", "examples")})
        return log, g0, {k: q.detach().clone().contiguous() for k, q in named}, model
    pilot = sorted(e["grad_norm"] for e in train(torch.float32, 1e9)[0])
    gap = max(range(1, len(pilot)), key=lambda i: pilot[i] / pilot[i - 1]); clip = float(f"{(pilot[gap - 1] + pilot[gap]) / 2:.3g}")   # some steps are clipped, some not, none nearly
    out.mkdir(parents=True, exist_ok=True)
    log, g0, final, model = train(torch.float32, clip, out)
    norms = [e["grad_norm"] for e in log]; assert min(norms) < clip < max(norms), (name, clip, norms)
    save_file(g0, out / "grads_step0.safetensors")
    save_file({f"step{s}.micro{m}.{k}": v for s, step in enumerate(batches) for m, mb in enumerate(step) for k, v in pack(mb, kto).items()}, out / "batches.safetensors")
    if lora is None: save_file(final, out / "final.safetensors")
    else:
        model.save_pretrained(out / "adapter", safe_serialization=True); (out / "adapter" / "README.md").unlink(missing_ok=True)
        f = out / "adapter" / "adapter_config.json"; c = json.loads(f.read_text()); c["base_model_name_or_path"] = None; c["target_modules"] = sorted(c["target_modules"]); f.write_text(json.dumps(c, indent=2))
    terms = [dict(loss=k, weight=w) for k, w in p["terms"]]; main = p["terms"][0][0]
    json.dump({"loss": {"terms": terms, **{k: v for k, v in p.items() if k != "terms"}},
               "reference": None if main in NO_REF else "checkpoint" if lora is None else o.get("reference", "adapter_disabled"),
               "optimizer": {"name": "adamw", "lr": o["lr"], "betas": [0.9, 0.999], "eps": o["eps"], "weight_decay": o["weight_decay"]},
               "scheduler": {"name": "cosine_with_warmup", "num_warmup_steps": o["warmup"], "num_training_steps": n}, "clip_grad_norm": clip,
               "lora": lora and {k: (sorted(v) if isinstance(v, list) else v) for k, v in lora.items()}, "steps": log}, open(out / "steps.json", "w"), indent=1)
    # how far f32 rounding carries: the same run in f64
    l64, g64, f64, _ = train(torch.float64, clip)
    rel = lambda a, b: max(abs(x - y) / max(1.0, abs(y)) for x, y in zip(a, b))
    acc = dict(loss=rel([e["loss"] for e in log], [e["loss"] for e in l64]), grad_norm=rel(norms, [e["grad_norm"] for e in l64]),
               grads_step0=max(float((g0[k].double() - g64[k]).abs().max() / g64[k].abs().max().clamp(min=1e-12)) for k in g0), final=max(float((final[k].double() - f64[k]).abs().max()) for k in final))
    worst["f32_vs_f64"][name] = {k: float(f"{v:.2g}") for k, v in acc.items()}
    print(name, "clip", clip, "norms", [round(x, 3) for x in norms], "loss", [round(e["loss"], 4) for e in log], "acc", [e.get("accuracy") for e in log], "kl", [e.get("kl_raw") for e in log] if kto else "", worst["f32_vs_f64"][name], flush=True)
    if check: worst["trl"][name] = trl_run(ckpt, p, lora, o, batches, out, log, g0, saved); print("   TRL:", worst["trl"][name], flush=True)

def trl_run(ckpt, p, lora, o, batches, out, log, g0, saved):
    """Every micro-batch of step 0 through TRL's trainer (its collator, its padding, its reference); losses and gradients weighted by pairs."""
    import tempfile
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from tokenizers import Tokenizer, models, pre_tokenizers
    tok = Tokenizer(models.WordLevel({"a": 3, "b": 4, "</s>": 2, "<u>": 0}, unk_token="<u>")); tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="</s>", pad_token="<u>", unk_token="<u>", bos_token="<u>")
    main = p["terms"][0][0]; kinds = [k for k, _ in p["terms"]]; weights = [w for _, w in p["terms"]]; kto = main == "kto"
    model = AutoModelForCausalLM.from_pretrained(ckpt, dtype=torch.float32, attn_implementation="eager")
    ref_model = None if lora is not None else AutoModelForCausalLM.from_pretrained(ckpt, dtype=torch.float32, attn_implementation="eager")
    peft = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **lora) if lora else None
    tmp = tempfile.mkdtemp(); common = dict(output_dir=tmp, bf16=False, use_cpu=True, gradient_checkpointing=False, report_to=[], per_device_train_batch_size=4, beta=p["beta"], max_length=512)
    rows = [dict(prompt="a", chosen="b", rejected="a b")] * 4
    if kto:
        from trl import KTOTrainer, KTOConfig
        t = KTOTrainer(model=model, ref_model=ref_model, args=KTOConfig(**common, desirable_weight=p["desirable_weight"], undesirable_weight=p["undesirable_weight"]), processing_class=tok, peft_config=peft,
                       train_dataset=Dataset.from_list([dict(prompt="a", completion="b", label=i % 2 == 0) for i in range(4)]))
    elif main == "orpo":
        from trl.experimental.orpo import ORPOTrainer, ORPOConfig
        t = ORPOTrainer(model=model, args=ORPOConfig(**common), processing_class=tok, train_dataset=Dataset.from_list(rows), peft_config=peft)
    elif main in NO_REF:
        from trl.experimental.cpo import CPOTrainer, CPOConfig
        t = CPOTrainer(model=model, args=CPOConfig(**common, loss_type="simpo", cpo_alpha=0.0, simpo_gamma=p["gamma"]), processing_class=tok, train_dataset=Dataset.from_list(rows), peft_config=peft)
    else:
        from trl import DPOTrainer, DPOConfig
        names = ["sft" if k == "nll" else k for k in kinds]
        if "sigmoid_smoothed" in names: return "no such loss in TRL 1.16 (label_smoothing has no effect on 'sigmoid')"
        if o.get("reference") == "adapter_init":   # a model that comes with an adapter: TRL keeps a copy of it under the name "ref"
            from peft import get_peft_model
            model = get_peft_model(model, peft, autocast_adapter_dtype=False); peft = None; init = load_file(out / "adapter_init.safetensors")
            with torch.no_grad():
                for k, q in model.named_parameters():
                    if q.requires_grad: q.copy_(init[saved(k)])
        t = DPOTrainer(model=model, ref_model=ref_model, args=DPOConfig(**common, loss_type=names, loss_weights=weights, label_smoothing=p.get("label_smoothing", 0.0)), processing_class=tok,
                       train_dataset=Dataset.from_list(rows), peft_config=peft)
    if lora:
        init = load_file(out / "adapter_init.safetensors")
        with torch.no_grad():
            for k, q in t.model.named_parameters():
                if q.requires_grad: q.copy_(init[saved(k)])
    t.model.eval(); t.model.zero_grad()
    step = batches[0]; N = sum(len(mb) for mb in step)
    if "nll" in kinds or p.get("kl") == "step": step = [[x for mb in step for x in mb]]      # TRL averages tokens (and KL) in a micro-batch: compare the whole step as one
    total, ex = 0.0, {}
    for mb in step:
        if kto:
            from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference as C
            batch = C(pad_token_id=0)([dict(prompt_ids=x["prompt"], completion_ids=x["response"], KL_completion_ids=x["kl"], label=x["desirable"]) for x in mb])
            l = t._compute_loss(t.model, batch, False); ex.setdefault("kl", []).append(t._metrics["eval"]["kl"][-1])
        elif main in NO_REF:
            def pad(rows, v): T = max(map(len, rows)); return torch.tensor([r + [v] * (T - len(r)) for r in rows])
            batch = {}
            for side in ("chosen", "rejected"):
                ids = [x["prompt"] + x[side] for x in mb]
                batch |= {f"{side}_input_ids": pad(ids, 0), f"{side}_attention_mask": pad([[1] * len(i) for i in ids], 0), f"{side}_labels": pad([[-100] * len(x["prompt"]) + x[side] for x in mb], -100)}
            l, met = t.get_batch_loss_metrics(t.model, batch, "train"); ex.setdefault("margin", []).append((met["rewards/margins"], len(mb)))
        else:
            from trl.trainer.dpo_trainer import DataCollatorForPreference as C
            batch = C(pad_token_id=0)([dict(prompt_ids=x["prompt"], chosen_ids=x["chosen"], rejected_ids=x["rejected"]) for x in mb])
            l = t._compute_loss(t.model, batch, False); ex.setdefault("margin", []).append((t._metrics["eval"]["rewards/margins"][-1], len(mb)))
            ex.setdefault("accuracy", []).append((t._metrics["eval"]["rewards/accuracies"][-1], len(mb)))
        (l * len(mb) / N).backward(); total += l.item() * len(mb) / N
    grads = {saved(k): q.grad for k, q in t.model.named_parameters() if q.requires_grad}
    res = dict(loss=abs(total - log[0]["loss"]), grads=max(float((grads[k] - g0[k]).abs().max()) for k in g0), grads_relative=max(float((grads[k] - g0[k]).abs().max() / g0[k].abs().max().clamp(min=1e-12)) for k in g0))
    for k in ("margin", "accuracy"):
        if k in ex: res[k] = abs(sum(v * w for v, w in ex[k]) / N - log[0][k])
    if kto: res["kl"] = max(abs(a - b) for a, b in zip(ex["kl"], log[0]["kl"]))
    return {k: float(f"{v:.2g}") for k, v in res.items()}

# ---------------------------------------------------------------- data.json
def m(*turns): return [dict(role={"s": "system", "u": "user", "a": "assistant"}[r], content=c) for r, c in turns]
HEAD = m(("s", "You answer briefly."), ("u", "Who are you?"))
LONG = m(("s", "You answer briefly."), ("u", "Name a city."), ("a", "Paris."), ("u", "Another one? "))
PAIRS = {
    "main": [  # name, row, note
        ("strings", dict(prompt="The capital of Scotland is", chosen=" Edinburgh.", rejected=" Glasgow, of course."), None),
        ("strings, not ascii", dict(prompt="Wie spät ist es?\n", chosen="Fünf nach zwölf 🕛", rejected="我不知道"), None),
        ("prompt ends with a space", dict(prompt="Answer: ", chosen="yes", rejected="no"), "the space merges with the first word: it leaves the prompt"),
        ("tokens merge across the boundary", dict(prompt="The police are investi", chosen="gating it.", rejected=" nothing."), "the prompt is cut for both where either one diverges"),
        ("end token already there", dict(prompt="Say hi.", chosen=" Hi!<|end_of_text|>", rejected=" No."), "it is not doubled"),
        ("end token in the middle", dict(prompt="Say hi.", chosen=" Hi!<|end_of_text|> there", rejected=" No.<|end_of_text|>\n"), "a text that does not END with it gets another one"),
        ("identical responses", dict(prompt="Repeat:", chosen=" same", rejected=" same"), "kept: loss ln 2, gradient 0"),
        ("empty prompt", dict(prompt="", chosen="Hello there.", rejected="Go away."), "no token stands before the first response token: it is never predicted"),
        ("empty rejected", dict(prompt="Say something.", chosen=" Something.", rejected=""), "the response is its end token"),
        ("both empty", dict(prompt="Say nothing.", chosen="", rejected=""), None),
        ("everything empty", dict(prompt="", chosen="", rejected=""), "one token, nothing predicted"),
        ("implicit prompt", dict(chosen="The sky is blue.", rejected="The sky is green."), "the space before the first difference goes to the responses"),
        ("implicit prompt, difference inside a word", dict(chosen="It was greenish.", rejected="It was greyish."), "characters, not words: the prompt ends inside the word"),
        ("implicit prompt, identical", dict(chosen="abc", rejected="abc"), "quirk: the last character becomes the response"),
        ("implicit prompt, one begins the other", dict(chosen="The end", rejected="The end is near"), "quirk: the prompt stops one character before the shorter one's end"),
        ("implicit prompt, nothing in common", dict(chosen="Yes.", rejected="No."), None),
        ("implicit prompt, nothing in common, chosen ends with a space", dict(chosen="Yes ", rejected="No."), "quirk: index -1 is taken for the character before"),
        ("implicit prompt, empty rejected", dict(chosen="Yes.", rejected=""), "quirk: an error"),
        ("messages", dict(prompt=HEAD, chosen=m(("a", "A small model.")), rejected=m(("a", "None of your business."))), "the assistant's header belongs to the prompt; no end token beyond the template's"),
        ("messages, trimmed", dict(prompt=m(("u", " And now? ")), chosen=m(("a", " Still the same.\n")), rejected=m(("a", "您好"))), "the template trims"),
        ("messages, identical", dict(prompt=HEAD, chosen=m(("a", "Me.")), rejected=m(("a", "Me."))), None),
        ("messages, empty rejected", dict(prompt=HEAD, chosen=m(("a", "Me.")), rejected=m(("a", ""))), "<|eot_id|> alone"),
        ("messages, several turns in the response", dict(prompt=HEAD, chosen=m(("a", "A model."), ("u", "Which?"), ("a", "A small one.")), rejected=m(("a", "No."))), "TRL learns the whole response, the user's turn in it included"),
        ("messages, prompt ends with an assistant turn", dict(prompt=HEAD + m(("a", "A model.")), chosen=m(("u", "Which?"), ("a", "Small.")), rejected=m(("u", "Why?"), ("a", "So."))), "the generation prompt is not in the whole text: cut where they diverge"),
        ("implicit messages", dict(chosen=HEAD + m(("a", "A small model.")), rejected=HEAD + m(("a", "None of your business."))), "shared messages are the prompt"),
        ("implicit messages, longer", dict(chosen=LONG + m(("a", "Rome.")), rejected=LONG + m(("a", "I know only one."), ("u", "Really?"), ("a", "Yes."))), None),
        ("implicit messages, shared prefix of an answer", dict(chosen=m(("u", "Go on."), ("a", "One two three.")), rejected=m(("u", "Go on."), ("a", "One two four."))), "messages are compared whole"),
        ("implicit messages, identical", dict(chosen=HEAD + m(("a", "Me.")), rejected=HEAD + m(("a", "Me."))), "all but the last message are the prompt"),
        ("implicit messages, one begins the other", dict(chosen=HEAD + m(("a", "Me.")), rejected=HEAD + m(("a", "Me."), ("u", "Who?"), ("a", "Me!"))), "quirk: the shorter one keeps its last message"),
    ],
    "holdout": [
        ("strings", dict(prompt="Q: How many legs has a spider?\nA:", chosen=" Eight.", rejected=" Six, like all insects."), None),
        ("strings, not ascii", dict(prompt="¿Dónde está?", chosen=" Aquí – détrás 👻👻", rejected=" どこにもない。"), None),
        ("boundary", dict(prompt="She is an entre", chosen="preneur", rejected="e"), None),
        ("prompt ends with a newline", dict(prompt="List:\n", chosen="\n- a\n- b", rejected="- a"), None),
        ("end token already there", dict(prompt="Bye", chosen="!<|end_of_text|>", rejected=".<|end_of_text|>"), None),
        ("identical responses", dict(prompt="x", chosen="y", rejected="y"), None),
        ("empty prompt", dict(prompt="", chosen=" leading space", rejected="none"), None),
        ("empty chosen", dict(prompt="Say nothing.", chosen="", rejected=" But why?"), None),
        ("implicit prompt", dict(chosen="Two plus two is four.", rejected="Two plus two is five."), None),
        ("implicit prompt, new word", dict(chosen="I like red wine.", rejected="I like tea."), None),
        ("implicit prompt, identical", dict(chosen="Same text", rejected="Same text"), "quirk: the last character becomes the response"),
        ("implicit prompt, no space", dict(chosen="2+2=4", rejected="2+2=5"), None),
        ("messages", dict(prompt=LONG, chosen=m(("a", "Rome.")), rejected=m(("a", "No idea."))), None),
        ("messages, whitespace answer", dict(prompt=HEAD, chosen=m(("a", "Me.")), rejected=m(("a", "  \n"))), None),
        ("implicit messages", dict(chosen=LONG + m(("a", "Ō saka")), rejected=LONG + m(("a", "Osaka"))), None),
        ("implicit messages, diverge early", dict(chosen=HEAD[:1] + m(("u", "Hm?"), ("a", "Yes?")), rejected=HEAD + m(("a", "Yes?"))), "the response begins with the user's turn"),
    ],
}
TRUNCATE = {"main": [("strings", (12, 9, 7, 6, 5)), ("messages", (47, 46, 43, 40, 39, 20)), ("implicit messages, longer", (75, 63, 62, 61, 20)), ("implicit messages, shared prefix of an answer", (24, 21, 20)), ("empty rejected", (8, 6, 5, 4)), ("empty prompt", (5, 1)), ("identical responses", (6, 5, 3))],
            "holdout": [("strings", (27, 22, 16, 15)), ("messages", (67, 64, 62, 61)), ("implicit messages, diverge early", (42, 33, 21, 20)), ("empty chosen", (9, 6, 5))]}
TUNE = {"main": [("two turns", HEAD, m(("a", "A small model.")), m(("a", "None of your business."))), ("four turns", LONG, m(("a", "Rome.")), m(("a", "I know only one."))),
                 ("different lengths", HEAD[1:], m(("a", "A."), ("u", "B?"), ("a", "C.")), m(("a", "D.")))],
        "holdout": [("four turns", LONG, m(("a", "Oslo?"), ("u", "Yes."), ("a", "Good.")), m(("a", "")))]}

def data_json(path, which, tokdir):
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.dpo_trainer import DPOTrainer, DataCollatorForPreference
    from trl.trainer.kto_trainer import KTOTrainer
    from trl import extract_prompt, unpair_preference_dataset
    toks = {}
    for name in ("bytelevel", "metaspace"):
        c = json.load(open(pathlib.Path(tokdir) / name / "tokenizer_config.json"))
        toks[name] = PreTrainedTokenizerFast(tokenizer_file=str(pathlib.Path(tokdir) / name / "tokenizer.json"), **{k: c[k] for k in ("bos_token", "eos_token", "unk_token", "chat_template") if k in c})
    out = dict(pairs=[], truncation=[], unpaired=[], all_assistant_turns=[])
    def prepare(row, tok, max_length=None, mode="keep_start"):
        return DPOTrainer._prepare_dataset(types.SimpleNamespace(_tokenizer=tok), Dataset.from_list([copy.deepcopy(row)]), tok, types.SimpleNamespace(dataset_num_proc=None, max_length=max_length, truncation_mode=mode), "train")
    for tname, tok in toks.items():
        for name, row, note in PAIRS[which]:
            if tname == "metaspace" and (not isinstance(row["chosen"], str) or name.startswith("implicit")): continue
            if tname == "metaspace": row = {k: v.replace("<|end_of_text|>", "</s>") for k, v in row.items()}
            e = dict(name=name, tokenizer=tname, row=row) | (dict(note=note) if note else {})
            try:
                if "prompt" not in row: e["extracted"] = {k: v for k, v in extract_prompt(copy.deepcopy(row)).items()}
                r = prepare(row, tok)[0]; e |= {k: list(r[k]) for k in ("prompt_ids", "chosen_ids", "rejected_ids")}
            except Exception as x: e["error"] = type(x).__name__
            out["pairs"].append(e)
    for name, lens in TRUNCATE[which]:
        row = next(r for n, r, _ in PAIRS[which] if n == name); tok = toks["bytelevel"]
        for L in lens:
            for mode in ("keep_start", "keep_end"):
                d = prepare(row, tok, L, mode); e = dict(name=name, tokenizer="bytelevel", max_length=L, truncation_mode=mode, kept=len(d) == 1)
                if len(d):
                    b = DataCollatorForPreference(pad_token_id=0, max_length=L, truncation_mode=mode)([d[0]])
                    for i, side in enumerate(("chosen", "rejected")):
                        n = int(b["attention_mask"][i].sum()); e[side + "_input_ids"] = b["input_ids"][i, :n].tolist(); e[side + "_labels"] = [t if c else -100 for t, c in zip(b["input_ids"][i, :n].tolist(), b["completion_mask"][i].tolist())]
                out["truncation"].append(e)
    # KTO: unpaired rows, and pairs taken apart; the KL response is that of the row before it in a group of `batch`, the first row's that of the last
    tok = toks["bytelevel"]; plain = [(n, r) for n, r, _ in PAIRS[which] if isinstance(r["chosen"], str) and "prompt" in r][:5]
    def kto(rows, batch):
        t = types.SimpleNamespace(_tokenizer=tok, calculate_KL=True, undesirable_weight=1.0, desirable_weight=1.0)
        d = KTOTrainer._prepare_dataset(t, rows, tok, types.SimpleNamespace(dataset_num_proc=None, max_length=None, per_device_train_batch_size=batch), "train")
        return [dict(prompt_ids=list(x["prompt_ids"]), completion_ids=list(x["completion_ids"]), KL_completion_ids=list(x["KL_completion_ids"]), label=bool(x["label"])) for x in d]
    rows = [dict(prompt=r["prompt"], completion=r["chosen" if i % 2 else "rejected"], label=bool(i % 2)) for i, (n, r) in enumerate(plain)]
    out["unpaired"].append(dict(name="rows with a label", rows=rows, batch=3, expected=kto(Dataset.from_list(rows), 3)))
    pairs = [dict(prompt=r["prompt"], chosen=r["chosen"], rejected=r["rejected"]) for n, r in plain[:3]]
    out["unpaired"].append(dict(name="pairs taken apart: all chosen, then all rejected", rows=pairs, batch=4, expected=kto(unpair_preference_dataset(Dataset.from_list(pairs)), 4)))
    # torchtune: both conversations whole, labels on EVERY assistant turn (its content and <|eot_id|>), also on those they share
    def spans(msgs):
        ids, labels, prev = [], [], ""
        render = lambda ms, gen=False: tok.apply_chat_template(ms, tokenize=False, add_generation_prompt=gen)
        for k in range(1, len(msgs) + 1):
            upto = render(msgs[:k])
            if msgs[k - 1]["role"] == "assistant": head = render(msgs[:k - 1], True); parts = [(head[len(prev):], False), (upto[len(head):], True)]
            else: parts = [(upto[len(prev):], False)]
            for text, learn in parts: x = tok(text, add_special_tokens=False)["input_ids"]; ids += x; labels += x if learn else [-100] * len(x)
            prev = upto
        assert ids == tok.apply_chat_template(msgs, tokenize=True, return_dict=True)["input_ids"]
        return ids, labels
    for name, head, c, r in TUNE[which]:
        row = dict(chosen_conversations=head + c, rejected_conversations=head + r); ci, cl = spans(head + c); ri, rl = spans(head + r)
        out["all_assistant_turns"].append(dict(name=name, tokenizer="bytelevel", column_map=dict(chosen="chosen_conversations", rejected="rejected_conversations"), row=row, chosen_input_ids=ci, chosen_labels=cl, rejected_input_ids=ri, rejected_labels=rl))
    path.write_text(json.dumps(out, ensure_ascii=False, indent=None).replace('}, {"name"', '},\n{"name"'))

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out"); ap.add_argument("--golden", required=True, help="folder with the families' checkpoints"); ap.add_argument("--set", default="main", choices=("main", "holdout")); ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--tokenizers", default=""); ap.add_argument("--only", default=""); ap.add_argument("--no-trl", action="store_true"); ap.add_argument("--torchtune", default="")
    a = ap.parse_args(); out = pathlib.Path(a.out) / "preference"; out.mkdir(parents=True, exist_ok=True); golden = pathlib.Path(a.golden)
    import datasets; datasets.disable_progress_bars(); transformers.utils.logging.disable_progress_bar()
    only = a.only.split(",") if a.only else None; want = lambda n: only is None or n in only
    vf = out / "versions.json"; worst = json.loads(vf.read_text()) if vf.exists() and only else {}
    worst.setdefault("trl", {}); worst.setdefault("f32_vs_f64", {})
    if want("losses"): losses_json(out / "losses.json", a.set, not a.no_trl, a.torchtune, worst); print("losses.json", worst.get("losses"), worst.get("losses_torchtune"))
    if want("data"): data_json(out / "data.json", a.set, a.tokenizers or golden / "data" / "tokenizers"); print("data.json")
    for fam, var, p, lora, o in RUNS[a.set]:
        if want(f"{fam}/{var}"): run_case(out / fam / var, golden / fam, a.seed, p, lora, o, not a.no_trl, worst, f"{fam}/{var}")
    v = lambda n: __import__("importlib.metadata").metadata.version(n)
    worst |= dict(seed=a.seed, versions={n: v(n) for n in ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "tokenizers")})
    vf.write_text(json.dumps(worst, indent=1))

if __name__ == "__main__": main()
