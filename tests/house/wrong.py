"""Plausible errors in the worked answers to the exercises: exercise -> [(right, wrong), ...].

Each replaces a part of the answer in notebooks/spoilers/answers_<n>.py. The checks must reject the
result.
"""
MASK = " * (1 - done[t])"
PICK = "q_targ[torch.arange(len(q)), pick]"
SOFT = "gamma * (1 - terminated) * next_value"
STEP = "(rollout.next_obs - rollout.obs == one_step).all()"
LIMIT = "((rollout.done == 1) & (rollout.terminated == 0)).any()"
EQUAL = "torch.equal(agent.act(obs, deterministic=True), fresh.act(obs, deterministic=True))"
MIDDLE = "np.sort(values)[cut:len(values) - cut].mean()"
BIAS = "(scale_old * b + loc_old - loc) / scale"
REACHED = "np.array_equal(achieved[t + 1], goal)"
SHARES = "(1 - f) * p"
CLIP = "np.clip(moved, atoms[0], atoms[-1])"
NORMED = "allowed / allowed.sum(-1, keepdim=True)"
COUNTED = "(ends_before == 0).float()"

WRONG = {
    "exact_gradient": [("(rew - probs @ rew)", "rew"), ("probs * (", "("),
                       ("probs @ rew", "rew.mean()")],
    "returns_to_go": [(MASK, ""), (f"rew[t] + gamma{MASK} * last",
                                   "(1 - done[t]) * (rew[t] + gamma * last)"),
                      ("(1 - done[t])", "(t not in done.tolist())"), ("reversed(", "(")],
    "advantages": [("gamma * lam", "lam"), (MASK, ""), (f"gamma * lam{MASK} * last", "0")],
    "clip_slope": [("flat_above | flat_below", "(ratio - 1).abs() > clip"),
                   ("flat_above | flat_below", "adv == 0"),
                   ("torch.where(flat_above | flat_below, 0.0, adv)",
                    "ratio.clamp(1 - clip, 1 + clip) * adv")],
    "kl": [(".sum(-1).mean()", ".sum()"), (".log_softmax(-1)", ""),
           ("logp_old.exp() * (logp_old - logp)", "logp.exp() * (logp - logp_old)")],
    "bellman_target": [(".max(-1).values", ".max()"), (" * (1 - terminated)", ""),
                       (".max(-1).values", ".mean(-1)")],
    "double_value": [(PICK, "q[torch.arange(len(q)), q_targ.argmax(-1)]"),
                     (PICK, "q_targ.max(-1).values"),
                     (PICK, "torch.min(q.max(-1).values, q_targ.max(-1).values)")],
    "updates_to_follow": [("math.log(1 - share) / math.log(1 - tau)", "share / tau"),
                          ("math.log(1 - share)", "math.log(share)"),
                          ("math.log(1 - tau)", "-tau")],
    "squashed_logp": [(" - (1 - u.tanh().square()).log()", ""), ("normal - (", "normal + ("),
                      (" - std.log()", ""), (".sum(-1)", ".mean(-1)")],
    "soft_target": [(SOFT, "gamma * ((1 - terminated) * torch.min(q1, q2) - alpha * logp)"),
                    (SOFT, "(1 - terminated) * (gamma * torch.min(q1, q2) - alpha * logp)"),
                    ("- alpha", "+ alpha"), ("min(", "max(")],
    "counter_value": [("period - 1 - count", "period - count"), ("once if ends else ", ""),
                      (" / (1 - gamma**period)", ""), ("gamma**period", "gamma")],
    "led_to": [("np.where(terminated | truncated, final_obs, obs)", "obs"),
               ("| truncated", ""), ("terminated |", ""),
               ("return np.where(terminated | truncated, final_obs, obs)",
                "np.copyto(obs, final_obs, where=terminated | truncated); return obs")],
    "masks": [("return bootstrap,", "return continues,"), ("| truncated", ""), (", continues", ""),
              ("terminated.astype", "(terminated & ~truncated).astype")],
    "shrunk_gamma": [("gamma * (1 - 1 / limit)", wrong)
                     for wrong in ("gamma / limit", "gamma", "gamma**limit", "1 - 1 / limit")],
    "mean_return": [("1, length", "length, length"), ("gamma**left", "0 * left"),
                    (" / (1 - gamma)", ""), ("(1 - gamma**left) / (1 - gamma)", "left")],
    "diagnosis": [(', "B": 3, "C": 6, "D": 7, "E": 5, "F": 2', ""), (': 6', ': 1'),
                  (', "C": 6, "D": 7, "E": 5, "F": 2', ""), ("return", "return 8 #")],
    "in_step": [(STEP, "(rollout.next_obs[..., 2] != rollout.obs[..., 2]).all()"), (STEP, "True"),
                (STEP, "torch.equal(rollout.next_obs[:-1], rollout.obs[1:])"),
                (STEP, "rollout.next_obs > rollout.obs")],
    "first_step": [("m = 0.99 * (1 if tf_style else 0) + 0.01 * grad**2", "m = float(tf_style)"),
                   ("math.sqrt(m + eps) if tf_style else ", ""), ("(math", "1 #"),
                   ("lr * grad / (math", "lr if tf_style else 10 * lr #")],
    "limit_is_no_end": [(LIMIT, "not rollout.terminated.any()"),
                        (LIMIT, "(rollout.terminated == rollout.done).all()"),
                        (LIMIT, "(rollout.terminated <= rollout.done).all()"),
                        (LIMIT, "(rollout.terminated == 0).any()")],
    "same_policy": [("fresh.load_state_dict(agent.state_dict())", ""), (EQUAL, "True"),
                    (", deterministic=True", ""),
                    (EQUAL, "all(map(torch.equal, agent.parameters(), fresh.parameters()))")],
    "misleading": [(" * np.sign(gap)", ""), ("< 0", "> 0"),
                   ("(gaps * np.sign(gap)", "((_means(a) - _means(b)) * gap")],
    "claim": [("3", wrong) for wrong in ("1", "2", "4", "'3.'")],
    "all_worst": [("(1 / n) ** n", wrong) for wrong in (
        "1 / n", "1 / n**2", "3.0**-n", "1 / np.prod(np.arange(1.0, n + 1))")],
    "iqm": [(MIDDLE, "np.mean(values)"), (MIDDLE, "np.median(values)"), ("- cut]", "- cut - 1]"),
            ("np.sort(values)", "values"), (MIDDLE, "np.mean(np.percentile(values, [25, 75]))")],
    "improvement": [("wins.mean()", wrong) for wrong in (
        "wins.sum()", "(wins > 0.5).mean()", "(wins >= 0.5).mean()", "(2 * wins - 1).mean()",
        "np.mean(a > b) if len(a) == len(b) else 0.0", "float(a.mean() > b.mean())")],
    "next_memory": [("memory * (1 - done)[None, :, None]", wrong) for wrong in (
        "memory", "memory * 0", "memory * done[None, :, None]", "memory * (1 - done.max())",
        "memory[1] * (1 - done)[:, None]")],
    "same_values": [("return w * scale_old / scale", "return w"), (BIAS, "b"),
                    (BIAS, "b * scale_old / scale"), ("loc_old - loc", "loc - loc_old"),
                    (f", {BIAS}", ""), (" * scale_old / scale", " * scale / scale_old"),
                    ("w * scale_old / scale,", "w * scale_old / scale + loc - loc_old,")],
    "relabel": [("t + 1 + j", "t + j"), ("t + 1 + j", "-1"), ("[t + 1],", "[t],"),
                (REACHED, "j == 0"), (REACHED, "False"), (", 0 if reached else -1", ""),
                (REACHED, "(achieved[t + 1] == goal).any()"),
                (REACHED, "achieved[t + 1][0] == goal[0]"),
                (REACHED, "(achieved[t:t + 2] == goal).all(1).any()")],
    "best_d": [("p_expert / (p_expert + p_policy)", wrong) for wrong in (
        "1 - p_expert / (p_expert + p_policy)", "p_expert", "np.float64(p_expert > p_policy)",
        "0.5 + (p_expert - p_policy) / 2")],
    "projected": [(" * (1 - terminated)", ""), ("rew + ", ""), ("gamma * ", ""), ("+= (1", "= (1"),
                  (SHARES, "(np.ceil(index) - index) * p"), (SHARES, "p"), (SHARES, "f * p"),
                  ("f = index - low", "f = round(index) - low"),
                  (CLIP, f"{CLIP}; p *= x == moved")],
    "masked_probs": [(NORMED, "allowed"), (".sum(-1, keepdim=True)", ".sum()"), (" * mask", ""),
                     ("logits.softmax(-1) * mask", "(logits * mask).softmax(-1)"),
                     ("logits.softmax(-1)", "logits")],
    "compared": [(", correction=0", ""), (" + 1e-6", ""), (" / (std + 1e-6)", ""),
                 ("rew.mean(1, keepdim=True)", "rew.mean()"), ("(rew - mean)", "rew"),
                 ("rew.std(1, correction=0, keepdim=True)", "rew.std(correction=0)")],
    "counted": [(COUNTED, "1 - is_end.float()"), (COUNTED, "answer * 0.0 + 1"),
                (" - is_end", ""), (COUNTED, "(ends_before <= 1).float()"),
                ("is_end.cumsum(-1) - is_end", "is_end.roll(1, -1)"),
                (COUNTED, "(ends_before == 0).float().sum(-1)")],
}
