"""Clocks against the plain thing: what every lane knows of every actor, as one matrix."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab.emulator.checks.vector_clocks import Clocks

LANES, CLUSTER = 128, 64
EVERYBODY = np.arange(LANES)
some_lanes = st.one_of(
    st.integers(1, (1 << LANES) - 1).map(lambda bits: EVERYBODY[[bits >> lane & 1 == 1 for lane in range(LANES)]]),
    st.sampled_from([EVERYBODY, *EVERYBODY.reshape(-1, 64), *EVERYBODY.reshape(-1, 32), *EVERYBODY[:40:13, None]]),
)
steps = st.lists(st.tuples(st.sampled_from(["tell", "hear", "meet", "wait", "land", "fence"]), some_lanes), max_size=30)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(steps)
def test_vector_clocks_agree_with_a_matrix_of_knowledge(steps):
    clocks = Clocks(LANES, CLUSTER, engines=True, spaces=2)
    # of lanes and engines; then what of these the async proxy sees, in each of two spaces
    knowledge = np.concatenate((np.eye(LANES, dtype=int), np.zeros((LANES, 5 * LANES), int)), axis=1)
    messages = [({}, np.zeros(6 * LANES, int))]  # as a clock, and as a row of the matrix
    for serial, (step, lanes) in enumerate(steps, 1):
        if step == "tell":
            messages.append((clocks.known_to(lanes), knowledge[lanes].max(axis=0)))
            clocks.tick(lanes)
            knowledge[lanes, lanes] += 1
        elif step == "hear":
            clock, row = messages[serial % len(messages)]
            clocks.learn(lanes, clock)
            knowledge[lanes] = np.maximum(knowledge[lanes], row)
        elif step == "meet":
            clocks.meet(lanes)
            for warp in np.unique(lanes // 32):
                lanes_of_warp = lanes[lanes // 32 == warp]
                knowledge[lanes_of_warp] = knowledge[lanes_of_warp].max(axis=0)
            knowledge[lanes, lanes] += 1
        elif step == "wait":
            clocks.wait(lanes, serial, for_warp=False)
            knowledge[lanes, LANES + lanes] = serial
        elif step == "fence":
            space = serial % 2
            clocks.fence_proxy(lanes, space)
            knowledge[lanes, 2 * LANES * (1 + space) : 2 * LANES * (2 + space)] = knowledge[lanes, : 2 * LANES]
        else:
            row = np.zeros(6 * LANES, int)
            row[LANES + lanes] = serial
            messages.append((clocks.engines(lanes, serial), row))
    lane, actor = (a.reshape(-1) for a in np.indices(knowledge.shape))
    assert clocks.knows(lane, actor, knowledge.reshape(-1)).all()
    assert not clocks.knows(lane, actor, knowledge.reshape(-1) + 1).any()
