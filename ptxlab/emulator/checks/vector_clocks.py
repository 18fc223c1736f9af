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


def join_clocks(a: Clock, b: Clock) -> Clock:
    """Join two clocks; return `a` itself, or `b`, where that holds all."""
    if a is b or not a:
        return b
    news = {
        cluster: times
        for cluster, times in b.items()
        if cluster not in a or (a[cluster] is not times and (a[cluster] < times).any())
    }
    if not news:
        return a
    joined_clock = a | {
        cluster: times if cluster not in a or (times >= a[cluster]).all() else np.maximum(times, a[cluster])
        for cluster, times in news.items()
    }
    return (
        b
        if len(joined_clock) == len(b) and all(joined_clock[cluster] is times for cluster, times in b.items())
        else joined_clock
    )


def memoize_join() -> Callable[[Clock, Clock], Clock]:
    """Build a `join_clocks` that caches its results by object, as most rows join the same two clocks."""
    cached_joins: dict[tuple[int, int], tuple[Clock, Clock, Clock]] = {}

    def join(a: Clock, b: Clock) -> Clock:
        pair = id(a), id(b)
        if pair not in cached_joins:
            cached_joins[pair] = a, b, join_clocks(a, b)
        return cached_joins[pair][2]

    return join


def groups(keys: Array) -> list[Array]:
    """Return for each distinct key, in ascending order, the array of its positions."""
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)


def by_clock(clocks: dict[int, Clock], lanes: Array) -> list[tuple[Clock, Array]]:
    """Group the lanes that have a clock by the identity of that clock."""
    lanes_by_clock: dict[int, tuple[Clock, list[int]]] = {}
    for lane in lanes.tolist() if clocks else ():
        clock = clocks.get(lane)
        if clock is not None:
            lanes_by_clock.setdefault(id(clock), (clock, []))[1].append(lane)
    return [(clock, np.array(clock_lanes)) for clock, clock_lanes in lanes_by_clock.values()]


class Clocks:
    """Vector clocks of all lanes of a wave. Sets of lanes are sorted index arrays here."""

    def __init__(self, lanes: int, cluster: int, engines: bool, spaces: int = 0) -> None:
        """Begin with lanes that know nothing of each other.

        `cluster`: lanes of one; `spaces`: how many are fenced by themselves for the async proxy.
        """
        self.lanes, self.size, self.kinds = lanes, cluster, (1 + engines) * (1 + spaces)
        self.actor_kinds = 1 + engines  # kinds of actors that do things; the others stand for what is visible of these
        # of each actor: what a lane has done, and which effects it has waited for
        self.own_times = np.zeros(self.kinds * lanes, np.int32)
        self.own_times[:lanes] = 1
        self.rows = np.zeros((lanes // 32, self.kinds * cluster), np.int32)
        self.other_clusters: dict[int, Clock] = {}  # row -> what is known of other clusters
        self.row = np.arange(lanes) // 32  # of each lane
        self.members = np.full(lanes // 32, 32)  # of each row
        self.free_rows: list[int] = []  # rows without any

    # Questions

    def knows(self, lanes: Array, actors: Array, times: Array) -> Array:
        """Tell for each lane whether it knows its actor's events up to the given time."""
        actor_lanes, rows = actors % self.lanes, self.row[lanes]
        columns = actor_lanes % self.size + actors // self.lanes * self.size
        known_times = self.rows[rows, columns]
        is_own = actor_lanes == lanes
        known_times[is_own] = np.maximum(known_times, self.own_times[actors])[is_own]
        clusters = actor_lanes // self.size
        other_cluster_lanes = np.flatnonzero(clusters != lanes // self.size)
        if len(other_cluster_lanes):
            known_times[other_cluster_lanes] = self.known_of_others(
                rows[other_cluster_lanes], clusters[other_cluster_lanes], columns[other_cluster_lanes]
            )
        is_known: Array = known_times >= times
        return is_known

    def known_to_anyone(self, actors: Array) -> Array:
        """Return the latest time up to which any lane knows the events of each actor."""
        actor_lanes = actors % self.lanes
        columns, known_times = actor_lanes % self.size + actors // self.lanes * self.size, self.own_times[actors].copy()
        for group in groups(actor_lanes // self.size):
            cluster, group_columns = int(actor_lanes[group[0]]) // self.size, columns[group]
            rows = np.unique(self.row[cluster * self.size : (cluster + 1) * self.size])
            known_times[group] = np.maximum(known_times[group], self.rows[np.ix_(rows, group_columns)].max(axis=0))
            for clock in self.other_clusters.values():
                if cluster in clock:
                    known_times[group] = np.maximum(known_times[group], clock[cluster][group_columns])
        return known_times

    def known_of_others(self, rows: Array, clusters: Array, columns: Array) -> Array:
        """Return the time up to which each row knows an actor of another cluster."""
        known_times = np.zeros(len(rows), np.int32)
        distinct, inverse = np.unique(rows, return_inverse=True)
        clocks = [self.other_clusters.get(row, NOTHING) for row in distinct.tolist()]
        first: dict[int, int] = {}  # few clocks, many rows
        clock_numbers = np.array([first.setdefault(id(clock), i) for i, clock in enumerate(clocks)])[inverse]
        for group in groups(clock_numbers * (self.lanes // self.size) + clusters) if len(self.other_clusters) else ():
            times = clocks[clock_numbers[group[0]]].get(int(clusters[group[0]]))
            if times is not None:
                known_times[group] = times[columns[group]]
        return known_times

    def shared_by(self, lanes: Array) -> Clock:
        """Return the joined clock of these lanes' rows."""
        rows = np.unique(self.row[lanes])
        other_clusters = self.other_clusters
        clocks = map(other_clusters.__getitem__, other_clusters.keys() & rows.tolist()) if other_clusters else ()
        clock = NOTHING
        for row_clock in {id(row_clock): row_clock for row_clock in clocks}.values():
            clock = join_clocks(clock, row_clock)
        clock = dict(clock)
        for cluster, cluster_lanes in self.by_cluster(lanes):
            row_times = self.rows[np.unique(self.row[cluster_lanes])].max(axis=0)
            clock[cluster] = np.maximum(row_times, clock.get(cluster, 0))
        return clock

    def known_to(self, lanes: Array, shared: Clock | None = None, own_times: Array | None = None) -> Clock:
        """Return the joined clock of these lanes, with their own events included.

        `shared`: what their rows said at the time, if not now.
        """
        clock = self.shared_by(lanes) if shared is None else dict(shared)
        own_times = self.own_times if own_times is None else own_times
        for cluster, cluster_lanes in self.by_cluster(lanes):
            columns, actors = self.columns(cluster_lanes)
            times = clock[cluster] = clock[cluster].copy()
            times[columns] = np.maximum(times[columns], own_times[actors])
        return clock

    def engines(self, lanes: Array, serial: int) -> Clock:
        """Return a clock that knows these lanes' engines up to the effect `serial`, and nothing else."""
        clock: Clock = {}
        for cluster, cluster_lanes in self.by_cluster(lanes):
            clock[cluster] = np.zeros(self.rows.shape[1], np.int32)
            clock[cluster][self.size + cluster_lanes % self.size] = serial
        return clock

    def columns(self, lanes: Array) -> tuple[Array, Array]:
        """Return, for the actors of all kinds of these lanes, their columns in the cluster's rows and their indices."""
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
        """Advance the lanes' own times, so that later events are not part of clocks released before."""
        self.own_times[lanes] += 1

    def wait(self, lanes: Array, serial: int, for_warp: bool) -> None:
        """Record that lanes know their own engines' effects up to `serial` to be done.

        A lane waits for its whole warp if that has asked as one (`for_warp`).
        """
        engines = self.lanes + lanes
        self.own_times[engines] = np.maximum(self.own_times[engines], serial)
        if for_warp:
            warp = (lanes[:, None] // 32 * 32 + np.arange(32)).reshape(-1)
            cells = self.row[warp], np.repeat(self.size + lanes % self.size, 32)
            self.rows[cells] = np.maximum(self.rows[cells], serial)

    def fence_proxy(self, lanes: Array, space: int) -> None:
        """Make all events that these lanes know of visible to the async proxy in this space."""
        rows, first = self.isolate_rows(lanes), self.actor_kinds * (1 + space)
        visible_columns = slice(first * self.size, (first + self.actor_kinds) * self.size)

        def copy_to_visible(times: Array) -> Array:
            times = times.copy()
            times[..., visible_columns] = times[..., : self.actor_kinds * self.size]
            return times

        self.rows[rows] = copy_to_visible(self.rows[rows])
        for row in self.other_clusters.keys() & rows.tolist():
            self.other_clusters[row] = {
                cluster: copy_to_visible(times) for cluster, times in self.other_clusters[row].items()
            }
        for kind in range(self.actor_kinds):
            self.own_times[(first + kind) * self.lanes + lanes] = self.own_times[kind * self.lanes + lanes]

    def visible(self, actors: Array, space: int) -> Array:
        """Return the actors whose times say up to when the async proxy sees these actors' events in this space."""
        return actors + self.actor_kinds * (1 + space) * self.lanes

    def learn(self, lanes: Array, clock: Clock) -> None:
        """Join a clock into the clocks of these lanes."""
        join = memoize_join()
        for cluster, cluster_lanes in self.by_cluster(lanes):
            knows_other_clusters = len(clock) > (cluster in clock)
            news = clock.get(cluster, np.zeros(1, np.int32))
            if not knows_other_clusters and (self.rows[np.unique(self.row[cluster_lanes])] >= news).all():
                continue
            rows = self.isolate_rows(cluster_lanes)
            self.rows[rows] = np.maximum(self.rows[rows], news)
            for row in rows.tolist() if knows_other_clusters else ():
                self.other_clusters[row] = join(self.other_clusters.get(row, NOTHING), clock)

    def meet(self, lanes: Array) -> None:
        """Join the clocks of these lanes with each other, warp by warp, own events included."""
        warps = lanes // 32
        if len(self.isolate_rows(lanes)) > len(np.unique(warps)):
            join = memoize_join()
            for group in groups(warps):
                self.unite(lanes[group], join)
        columns, actors = self.columns(lanes)
        cells = np.tile(self.row[lanes], self.kinds), columns
        self.rows[cells] = np.maximum(self.rows[cells], self.own_times[actors])
        self.tick(lanes)

    def isolate_rows(self, lanes: Array) -> Array:
        """Give these lanes rows that no other lane shares, and return the rows."""
        rows, counts = np.unique(self.row[lanes], return_counts=True)
        if (counts == self.members[rows]).all():
            return rows
        for group in groups(self.row[lanes]):
            group_lanes = lanes[group]
            row = int(self.row[group_lanes[0]])
            if len(group_lanes) == self.members[row]:
                continue
            new_row = self.new_row()
            self.rows[new_row] = self.rows[row]
            if row in self.other_clusters:
                self.other_clusters[new_row] = self.other_clusters[row]
            self.row[group_lanes] = new_row
            self.members[new_row] = len(group_lanes)
            self.members[row] -= len(group_lanes)
        return np.unique(self.row[lanes])

    def unite(self, lanes: Array, join: Callable[[Clock, Clock], Clock]) -> None:
        """Merge the rows of these lanes of one warp, shared with no other lanes, into one."""
        row, *merged_rows = np.unique(self.row[lanes]).tolist()
        for merged_row in merged_rows:
            self.rows[row] = np.maximum(self.rows[row], self.rows[merged_row])
            if merged_row in self.other_clusters:
                self.other_clusters[row] = join(
                    self.other_clusters.get(row, NOTHING), self.other_clusters.pop(merged_row)
                )
        self.row[lanes] = row
        self.members[row] = len(lanes)
        self.free_rows += merged_rows

    def new_row(self) -> int:
        """Return the index of an unused row; double the table if all are in use."""
        if not self.free_rows:
            count = len(self.rows)
            self.rows = np.concatenate((self.rows, np.zeros_like(self.rows)))
            self.members = np.concatenate((self.members, np.zeros_like(self.members)))
            self.free_rows = list(range(2 * count - 1, count - 1, -1))
        return self.free_rows.pop()
