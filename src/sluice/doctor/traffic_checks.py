"""Checks of what was asked for: more, longer, others, and less of it cached.

Each looks at one mechanism in the two windows of a ``Scene`` and says how a world without it looks.
"""

import numpy as np

from sluice.doctor.columns import Floats, Mask
from sluice.doctor.scene import OWN_EVENTS, Finding, Moved, Scene, absent, unknown
from sluice.doctor.world import World

# What a rate, a length or a share must move to be worth a replay.
RATE_SHARE_MIN = 0.08
LENGTH_SHARE_MIN = 0.08
HITS_MIN = 0.05
_TENANT_OF_GROWTH = 0.7
_TENANT_RATIO_MIN = 1.6


def queue_backed_up(scene: Scene) -> Finding:
    """More requests came than before, from no tenant in particular."""
    rate = scene.rate_moved(~scene.is_long)
    if not rate.rose_by(RATE_SHARE_MIN):
        which = "the rate of the others" if np.any(scene.is_long[scene.after]) else "the rate"
        return absent(f"{which} did not rise: {_rates(rate)}")
    tenant = _grown(scene, rate)
    if tenant is not None:
        name = scene.requests.of["tenant"][tenant]
        return absent(f"the growth is that of one tenant, {name or '(none)'}")
    return Finding(
        (f"requests came faster: {_rates(rate)}", *_queues(scene)),
        remove=lambda world: _thinned(world, ~_long_of(scene, world), rate.before / rate.after),
        next_look="sluice plan with this rate: the replicas that it takes",
    )


def noisy_tenant(scene: Scene) -> Finding:
    """One tenant sends much more than before."""
    if len(scene.requests.of["tenant"]) < 3:  # the first name is that of none
        return unknown("tenants: all requests have the same one, or none")
    rate = scene.rate_moved(~scene.is_long)
    tenant = _grown(scene, rate)
    if tenant is None:
        return absent("no tenant's rate grew much more than the others'")
    mine = scene.requests.names["tenant"] == tenant
    own = scene.rate_moved(mine & ~scene.is_long)
    others = scene.rate_moved(~mine & ~scene.is_long)
    name = scene.requests.of["tenant"][tenant]
    ratio = max(0.0, min(1.0, own.before / own.after))
    return Finding(
        (
            (
                f"tenant {name} sent {own.before:.2f} requests/s before and {own.after:.2f} then; "
                f"all others {_rates(others)}"
            ),
        ),
        remove=lambda world: _thinned(
            world, (world.tenant == tenant) & ~_long_of(scene, world), ratio
        ),
        controls=(("the rate of the other tenants stayed", not others.rose_by(0.25)),),
        series=mine.astype(float),
        next_look=f"limits of tenant {name}: requests_per_minute, concurrency, weight",
    )


def long_prompts(scene: Scene) -> Finding:
    """Some prompts are far longer than the usual ones, and others wait for their prefill."""
    requests, long = scene.requests, scene.is_long
    prompt = requests["prompt"]
    rows = scene.after[long[scene.after]]
    if len(rows) < 2:
        return absent(_no_long(scene))
    was, now = (float(long[each].mean()) for each in (scene.before, scene.after))
    work = prompt[rows].sum() / max(1.0, np.nansum(prompt[scene.after]))
    tenants = np.bincount(requests.names["tenant"][rows])
    who = requests.of["tenant"][int(np.argmax(tenants))]
    whose = f"; {tenants.max()} of them from {who}" if who else ""
    lengths = f"{prompt[rows].min():,.0f} to {prompt[rows].max():,.0f} tokens"
    rest = scene.moved(_usual_prompts(scene))
    longest = np.nanmax(prompt[scene.before])
    came = f"{len(rows)} prompts of {lengths} came, where the longest before had {longest:,.0f}"
    such = f"such are {was:.1%} → {now:.1%} of the requests and {work:.0%} of the prompt tokens"
    evidence = (
        f"{came}{whose}",
        f"{such}; the other prompts: mean {_pair(rest)} tokens",
        *_blame(scene, long),
    )
    return Finding(
        (*evidence, *deployments(scene)),
        remove=lambda world: _without_long(scene, world),
        series=long.astype(float),
        next_look="who sends them, a lower prefill_chunk_tokens_max, or a class of its own for "
        "long prompts",
    )


def longer_context(scene: Scene) -> Finding:
    """Most prompts are longer than before, as after a change of template or default context."""
    prompt = _usual_prompts(scene)
    mean = scene.moved(prompt)
    if not mean.rose_by(LENGTH_SHARE_MIN):
        which = "prompts" if not np.any(scene.is_long[scene.after]) else "the other prompts"
        return absent(f"{which} did not grow: mean {_pair(mean)} tokens")
    before, after = prompt[scene.before], prompt[scene.after]
    quartiles = [
        (float(np.nanquantile(before, q)), float(np.nanquantile(after, q))) for q in (0.25, 0.5)
    ]
    told = " and ".join(f"{b:,.0f} → {a:,.0f}" for b, a in quartiles)
    changes = deployments(scene)
    evidence = (
        f"prompts grew: mean {_pair(mean)} tokens; lower quarter and median {told}",
        *changes,
    )
    against = () if changes else ("no deployment is recorded near the start",)
    return Finding(
        evidence,
        against,
        remove=lambda world: _mapped(scene, world, "prompt", prompt),
        series=prompt,
        next_look="the prompt template and default context of the deployed version",
    )


def output_length(scene: Scene) -> Finding:
    """Answers are longer than before."""
    whole = scene.requests["cancelled"] == 0
    output = scene.requests["completion"]
    output = np.where(whole & (output > 0), output, np.nan)
    mean = scene.moved(output)
    if not mean.rose_by(LENGTH_SHARE_MIN):
        return absent(f"answers did not grow: mean {_pair(mean)} tokens")
    return Finding(
        (f"answers grew: mean {_pair(mean)} tokens",),
        remove=lambda world: _mapped(scene, world, "output", output),
        series=output,
        next_look="default max_tokens, reasoning effort and prompts of the callers",
    )


def cache_hits(scene: Scene) -> Finding:
    """Less of the prompts is found in the prefix cache."""
    requests = scene.requests
    prompt, cached = requests["prompt"], requests["cached"]
    # What is cached is found where the prompt is computed: of the others nothing is known.
    begun = ~np.isnan(requests["ttft_ns"])
    known = begun & ~np.isnan(cached) & (prompt > 0) & ~scene.is_long
    if not np.any(known):
        return unknown("cached tokens of requests")
    share = np.where(known, cached / np.maximum(1.0, prompt), np.nan)
    hits = scene.moved(share)
    tokens = scene.moved(np.where(known, cached, np.nan))
    # Longer prompts with the same cached beginning have a lower share and lost nothing.
    lost = tokens.before - tokens.after
    if not (hits.fell and tokens.fell and hits.before - hits.after >= HITS_MIN):
        return absent(f"cached share of prompts: {hits.before:.0%} → {hits.after:.0%}")
    return Finding(
        (
            (
                f"{hits.before:.0%} of prompt tokens were cached before, {hits.after:.0%} then: "
                f"{lost:,.0f} tokens more of each prompt are computed"
            ),
        ),
        remove=lambda world: _cached_again(scene, world, share),
        series=-share,
        next_look="what changed at the beginning of prompts: a date, an id or a new system text",
    )


# ------------------------------------------------------------------------------ worlds without it


def _thinned(world: World, chosen: Mask, share: float) -> World:
    """Of the chosen requests of the incident only a share came, evenly."""
    rows = np.flatnonzero(chosen & world.judged)
    kept = world.kept.copy()
    kept[rows[~_spread(len(rows), share)]] = False
    return world.changed(kept=kept)


def _spread(count: int, share: float) -> Mask:
    """So large a share of so many places, evenly."""
    places = np.arange(count + 1) * share
    found: Mask = np.floor(places[1:]) > np.floor(places[:-1])
    return found


def _without_long(scene: Scene, world: World) -> World:
    """Long prompts are as many of all as before; where more took the place of usual ones, those
    come instead."""
    is_long = scene.is_long
    long = _long_of(scene, world) & world.judged
    before, after = is_long[scene.before], is_long[scene.after]
    # As many of the long ones stay as make the odds of long against usual what they were.
    odds = [each.sum() / max(1, np.count_nonzero(~each)) for each in (before, after)]
    rows = np.flatnonzero(long)
    more = rows[~_spread(len(rows), odds[0] / odds[1])]
    if not scene.rate_moved(~is_long).fell:
        kept = world.kept.copy()
        kept[more] = False
        return world.changed(kept=kept)
    usual = scene.requests["prompt"][scene.before[~before]]
    prompt = world.prompt.copy()
    prompt[more] = np.resize(usual[usual > 0], len(more))
    return world.changed(prompt=prompt)


def _mapped(scene: Scene, world: World, column: str, values: Floats) -> World:
    """Each number of the incident becomes the baseline's number of the same rank."""
    usual = np.sort(values[scene.before][~np.isnan(values[scene.before])])
    mine = values[world.rows]
    which = world.judged & ~np.isnan(mine)
    known = np.sort(values[scene.after][~np.isnan(values[scene.after])])
    rank = (np.searchsorted(known, mine[which]) + 0.5) / max(1, len(known))
    changed = getattr(world, column).copy()
    changed[which] = np.maximum(1.0, np.quantile(usual, np.clip(rank, 0.0, 1.0)))
    return world.changed(**{column: changed})


def _cached_again(scene: Scene, world: World, shares: Floats) -> World:
    """As much of each prompt is cached as before: the usual number of tokens where there is one."""
    known = scene.before[~np.isnan(shares[scene.before])]
    cached = scene.requests["cached"][known]
    usual = float(np.median(cached[cached > 0])) if np.any(cached > 0) else 0.0
    hit = float(np.mean(cached > 0))
    wanted = np.minimum(usual, np.maximum(world.prompt - 1.0, 0.0))
    # Requests are hits as often as before; those that still are stay so.
    rows = np.flatnonzero(world.judged)
    chosen = rows[_spread(len(rows), hit)]
    changed = world.cached.copy()
    changed[chosen] = np.maximum(changed[chosen], wanted[chosen])
    return world.changed(cached=changed)


# -------------------------------------------------------------------------------------- the words


def deployments(scene: Scene) -> tuple[str, ...]:
    """What was deployed between the middle of the baseline and shortly after the incident began.

    Also earlier ones, as a change can lie dormant.
    """
    incident, baseline = scene.windows.incident, scene.windows.baseline
    close_ns = 0.1 * (incident.end_ns - incident.start_ns)
    found = []
    for change in scene.journal.changes:
        if change.what == "simulation" or change.what.startswith(OWN_EVENTS) or not change.details:
            continue
        before_s = (incident.start_ns - change.t_ns) / 1e9
        details = "; ".join(f"{name}: {value}" for name, value in change.details.items())
        if baseline.start_ns <= change.t_ns <= incident.start_ns + close_ns:
            when = f"{before_s:.0f} s before" if before_s > 1 else "at the time"
            found.append(f"deployed {when}: {details}")
    return tuple(found)


def _grown(scene: Scene, rate: Moved) -> int | None:
    """The tenant that most of the growth is from, if there is one."""
    requests = scene.requests
    tenants = len(requests.of["tenant"])
    usual = ~scene.is_long
    per_s = [
        np.bincount(requests.names["tenant"][rows][usual[rows]], minlength=tenants)
        / window.duration_s
        for rows, window in (
            (scene.before, scene.windows.baseline),
            (scene.after, scene.windows.incident),
        )
    ]
    growth = per_s[1] - per_s[0]
    top = int(np.argmax(growth))
    total = rate.after - rate.before
    if np.count_nonzero(per_s[1] > 0) < 2 or total <= 0 or not rate.rose_by(RATE_SHARE_MIN):
        return None
    of_growth = growth[top] / growth[growth > 0].sum()
    if of_growth < _TENANT_OF_GROWTH or per_s[1][top] < _TENANT_RATIO_MIN * per_s[0][top]:
        return None
    return top


def _long_of(scene: Scene, world: World) -> Mask:
    found: Mask = scene.is_long[world.rows]
    return found


def _queues(scene: Scene) -> tuple[str, ...]:
    if not scene.has_steps:
        return ()
    waiting = scene.steps_moved(scene.steps.waiting)
    return (f"requests waiting at a replica: mean {waiting.before:.1f} → {waiting.after:.1f}",)


def _usual_prompts(scene: Scene) -> Floats:
    """Tokens of prompts that are not ``is_long``; NaN of these."""
    prompt = scene.requests["prompt"]
    return np.where(scene.is_long | (prompt <= 0), np.nan, prompt)


def _no_long(scene: Scene) -> str:
    """Why no prompts are others than before, in words."""
    prompt = scene.requests["prompt"]
    mean = scene.moved(np.where(prompt > 0, prompt, np.nan))
    if mean.rose_by(LENGTH_SHARE_MIN):
        return f"prompts of all lengths grew, not some of them: mean {_pair(mean)} tokens"
    longest = [np.nanmax(prompt[rows], initial=0.0) for rows in (scene.before, scene.after)]
    return f"no more long prompts than before: the longest {longest[0]:,.0f} → {longest[1]:,.0f}"


def _blame(scene: Scene, chosen: Mask) -> tuple[str, ...]:
    """Whose prefill the steps of the incident computed."""
    steps = scene.steps
    if not scene.has_steps or not len(steps.chunk_step):
        return ()
    inside = scene.steps_after[steps.chunk_step] & (steps.chunk_request >= 0)
    total = steps.chunk_tokens[inside].sum()
    mine = steps.chunk_tokens[inside & chosen[steps.chunk_request]].sum()
    return (f"{mine / max(1.0, total):.0%} of the prefill in the steps was theirs",)


def _rates(rate: Moved) -> str:
    return f"{rate.before:.2f} → {rate.after:.2f} requests/s"


def _pair(number: Moved) -> str:
    return f"{number.before:,.0f} → {number.after:,.0f}"
