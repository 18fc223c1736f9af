"""Who knows what of whom to lie before its present: vector clocks, exact to the lane.

An *actor* is a lane, or what it has asked the engines for (copies, wgmma), numbered behind all lanes. A lane's own time
moves on whenever it makes something known; an engine's is the serial of what it does. What lanes know stands in rows,
one for all lanes of a warp that know the same, as they do once they have met: it parts where some of them learn
something for themselves. A row tells of the actors of the lane's cluster; what it knows of other clusters, which takes
a flag in global memory, is kept aside.

The async proxy (copy engine, wgmma) sees what threads have done only where a proxy fence lies between. So for every
actor and each space that is fenced by itself, there is one more: what of it some fence has made visible. A fence copies
what its lane knows into what it knows to be visible; then barriers and the like hand that on, as they do everything.
"""

from collections.abc import Callable, Iterator

import numpy as np

from ptxlab.emulator.front.types import Array

# Cluster -> times of its actors (lanes, then engines): what lies before. Clocks are shared, and never changed.
Clock = dict[int, Array]
NOTHING: Clock = {}


def joined(a: Clock, b: Clock) -> Clock:
    """Join two clocks; return `a` itself, or `b`, where that holds all."""
    if a is b or not a:
        return b
    news = {at: times for at, times in b.items() if at not in a or (a[at] is not times and (a[at] < times).any())}
    if not news:
        return a
    both = a | {at: times if at not in a or (times >= a[at]).all() else np.maximum(times, a[at])
                for at, times in news.items()}  # fmt: skip
    return b if len(both) == len(b) and all(both[at] is times for at, times in b.items()) else both


def remembering() -> Callable[[Clock, Clock], Clock]:
    """Build a `joined` that remembers its results: most of many rows have the same two clocks."""
    known: dict[tuple[int, int], tuple[Clock, Clock, Clock]] = {}

    def join(a: Clock, b: Clock) -> Clock:
        pair = id(a), id(b)
        if pair not in known:
            known[pair] = a, b, joined(a, b)
        return known[pair][2]

    return join


def groups(keys: Array) -> list[Array]:
    """Group the positions of equal keys, in their order."""
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)


def by_clock(clocks: dict[int, Clock], lanes: Array) -> list[tuple[Clock, Array]]:
    """Group the lanes that have a clock by that clock, the very same object."""
    found: dict[int, tuple[Clock, list[int]]] = {}
    for lane in lanes.tolist() if clocks else ():
        clock = clocks.get(lane)
        if clock is not None:
            found.setdefault(id(clock), (clock, []))[1].append(lane)
    return [(clock, np.array(those)) for clock, those in found.values()]


class Clocks:
    """The knowledge of all lanes of a wave. Sets of lanes are sorted index arrays here."""

    def __init__(self, lanes: int, cluster: int, engines: bool, spaces: int = 0) -> None:
        """Begin with lanes that know nothing of each other.

        `cluster`: lanes of one; `spaces`: how many are fenced by themselves for the async proxy.
        """
        self.lanes, self.size, self.kinds = lanes, cluster, (1 + engines) * (1 + spaces)
        self.real = 1 + engines  # kinds of actors that do things; the others stand for what is visible of these
        self.own = np.zeros(self.kinds * lanes, np.int32)  # what a lane has done, and which effects it has waited for
        self.own[:lanes] = 1
        self.rows = np.zeros((lanes // 32, self.kinds * cluster), np.int32)
        self.far: dict[int, Clock] = {}  # row -> what is known of other clusters
        self.row = np.arange(lanes) // 32  # of each lane
        self.members = np.full(lanes // 32, 32)  # of each row
        self.free: list[int] = []  # rows without any

    # Questions

    def knows(self, lanes: Array, actors: Array, times: Array) -> Array:
        """Tell for each lane whether it knows what that actor has done until then."""
        whose, rows = actors % self.lanes, self.row[lanes]
        columns = whose % self.size + actors // self.lanes * self.size
        known = self.rows[rows, columns]
        mine = whose == lanes
        known[mine] = np.maximum(known, self.own[actors])[mine]
        clusters = whose // self.size
        far = np.flatnonzero(clusters != lanes // self.size)
        if len(far):
            known[far] = self.known_of_others(rows[far], clusters[far], columns[far])
        result: Array = known >= times
        return result

    def known_to_anyone(self, actors: Array) -> Array:
        """Return the latest time until which any lane knows what each of these actors has done."""
        whose = actors % self.lanes
        columns, known = whose % self.size + actors // self.lanes * self.size, self.own[actors].copy()
        for group in groups(whose // self.size):
            cluster, those = int(whose[group[0]]) // self.size, columns[group]
            rows = np.unique(self.row[cluster * self.size : (cluster + 1) * self.size])
            known[group] = np.maximum(known[group], self.rows[np.ix_(rows, those)].max(axis=0))
            for clock in self.far.values():
                if cluster in clock:
                    known[group] = np.maximum(known[group], clock[cluster][those])
        return known

    def known_of_others(self, rows: Array, clusters: Array, columns: Array) -> Array:
        """Return the time up to which each row knows an actor of another cluster."""
        known = np.zeros(len(rows), np.int32)
        distinct, at = np.unique(rows, return_inverse=True)
        clocks = [self.far.get(row, NOTHING) for row in distinct.tolist()]
        first: dict[int, int] = {}  # few clocks, many rows
        which = np.array([first.setdefault(id(clock), i) for i, clock in enumerate(clocks)])[at]
        for group in groups(which * (self.lanes // self.size) + clusters) if len(self.far) else ():
            times = clocks[which[group[0]]].get(int(clusters[group[0]]))
            if times is not None:
                known[group] = times[columns[group]]
        return known

    def shared_by(self, lanes: Array) -> Clock:
        """Return the joined clock of these lanes' rows."""
        rows = np.unique(self.row[lanes])
        clocks = map(self.far.__getitem__, self.far.keys() & rows.tolist()) if self.far else ()
        clock = NOTHING
        for other in {id(other): other for other in clocks}.values():
            clock = joined(clock, other)
        clock = dict(clock)
        for cluster, those in self.by_cluster(lanes):
            here = self.rows[np.unique(self.row[those])].max(axis=0)
            clock[cluster] = np.maximum(here, clock.get(cluster, 0))
        return clock

    def known_to(self, lanes: Array, shared: Clock | None = None, own: Array | None = None) -> Clock:
        """Return what these lanes know, and have done themselves, together.

        `shared`: what their rows said at the time, if not now.
        """
        clock = self.shared_by(lanes) if shared is None else dict(shared)
        own = self.own if own is None else own
        for cluster, those in self.by_cluster(lanes):
            columns, actors = self.columns(those)
            times = clock[cluster] = clock[cluster].copy()
            times[columns] = np.maximum(times[columns], own[actors])
        return clock

    def engines(self, lanes: Array, serial: int) -> Clock:
        """Return the clock of those that know of the effect `serial` by these lanes' engines."""
        clock: Clock = {}
        for cluster, those in self.by_cluster(lanes):
            clock[cluster] = np.zeros(self.rows.shape[1], np.int32)
            clock[cluster][self.size + those % self.size] = serial
        return clock

    def columns(self, lanes: Array) -> tuple[Array, Array]:
        """Return the columns, in the rows of its cluster, of each lane's actors of every kind; and their numbers."""
        if self.kinds == 1:
            return lanes % self.size, lanes
        kinds = np.arange(self.kinds)[:, None]
        return (kinds * self.size + lanes % self.size).reshape(-1), (kinds * self.lanes + lanes).reshape(-1)

    def by_cluster(self, lanes: Array) -> Iterator[tuple[int, Array]]:
        """Yield the lanes of each cluster."""
        clusters = lanes // self.size
        if clusters[0] == clusters[-1]:
            yield int(clusters[0]), lanes
            return
        for group in groups(clusters):
            yield int(clusters[group[0]]), lanes[group]

    # Changes

    def tick(self, lanes: Array) -> None:
        """Advance the lanes' own times: what they do from now on is not part of what they have made known."""
        self.own[lanes] += 1

    def wait(self, lanes: Array, serial: int, for_warp: bool) -> None:
        """Record that lanes have waited for what they have asked for.

        A lane waits for its whole warp if that has asked as one (`for_warp`).
        """
        engines = self.lanes + lanes
        self.own[engines] = np.maximum(self.own[engines], serial)
        if for_warp:
            warp = (lanes[:, None] // 32 * 32 + np.arange(32)).reshape(-1)
            at = self.row[warp], np.repeat(self.size + lanes % self.size, 32)
            self.rows[at] = np.maximum(self.rows[at], serial)

    def fence_proxy(self, lanes: Array, space: int) -> None:
        """Make visible to the async proxy, in this space, what these lanes know and have done."""
        rows, first = self.apart(lanes), self.real * (1 + space)
        seen = slice(first * self.size, (first + self.real) * self.size)

        def fenced(times: Array) -> Array:
            times = times.copy()
            times[..., seen] = times[..., : self.real * self.size]
            return times

        self.rows[rows] = fenced(self.rows[rows])
        for row in self.far.keys() & rows.tolist():
            self.far[row] = {cluster: fenced(times) for cluster, times in self.far[row].items()}
        for kind in range(self.real):
            self.own[(first + kind) * self.lanes + lanes] = self.own[kind * self.lanes + lanes]

    def visible(self, actors: Array, space: int) -> Array:
        """Return the actors that stand for what the async proxy sees of these, in this space."""
        return actors + self.real * (1 + space) * self.lanes

    def learn(self, lanes: Array, clock: Clock) -> None:
        """Make a clock known to these lanes, and no others."""
        join = remembering()
        for cluster, those in self.by_cluster(lanes):
            elsewhere = len(clock) > (cluster in clock)
            news = clock.get(cluster, np.zeros(1, np.int32))
            if not elsewhere and (self.rows[np.unique(self.row[those])] >= news).all():
                continue
            rows = self.apart(those)
            self.rows[rows] = np.maximum(self.rows[rows], news)
            for row in rows.tolist() if elsewhere else ():
                self.far[row] = join(self.far.get(row, NOTHING), clock)

    def meet(self, lanes: Array) -> None:
        """Make known to these lanes, in each warp, what any of them knows and has done."""
        warps = lanes // 32
        if len(self.apart(lanes)) > len(np.unique(warps)):
            join = remembering()
            for group in groups(warps):
                self.unite(lanes[group], join)
        columns, actors = self.columns(lanes)
        at = np.tile(self.row[lanes], self.kinds), columns
        self.rows[at] = np.maximum(self.rows[at], self.own[actors])
        self.tick(lanes)

    def apart(self, lanes: Array) -> Array:
        """Give these lanes rows that are theirs alone, and return the rows."""
        rows, counts = np.unique(self.row[lanes], return_counts=True)
        if (counts == self.members[rows]).all():
            return rows
        for group in groups(self.row[lanes]):
            mine = lanes[group]
            row = int(self.row[mine[0]])
            if len(mine) == self.members[row]:
                continue
            new = self.new_row()
            self.rows[new] = self.rows[row]
            if row in self.far:
                self.far[new] = self.far[row]
            self.row[mine] = new
            self.members[new] = len(mine)
            self.members[row] -= len(mine)
        return np.unique(self.row[lanes])

    def unite(self, lanes: Array, join: Callable[[Clock, Clock], Clock]) -> None:
        """Unite the rows of lanes of one warp, which have rows of their own, into one."""
        row, *others = np.unique(self.row[lanes]).tolist()
        for other in others:
            self.rows[row] = np.maximum(self.rows[row], self.rows[other])
            if other in self.far:
                self.far[row] = join(self.far.get(row, NOTHING), self.far.pop(other))
        self.row[lanes] = row
        self.members[row] = len(lanes)
        self.free += others

    def new_row(self) -> int:
        """Return a row that no lane has."""
        if not self.free:
            count = len(self.rows)
            self.rows = np.concatenate((self.rows, np.zeros_like(self.rows)))
            self.members = np.concatenate((self.members, np.zeros_like(self.members)))
            self.free = list(range(2 * count - 1, count - 1, -1))
        return self.free.pop()
