"""Memory for hot rows where nobody states it: the size that gains most, within what the plan leaves of the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recmill.data.schema import Table
from recmill.planning.hot.selection import HotChoice
from recmill.planning.tiers.problem import table_bytes

# Of the bytes of all tables. FAE's hot rows are a few percent of the tables; all of them pay where the network is slow
# and the tables are small.
SHARES = (1 / 64, 1 / 16, 1 / 4, 1.0)


def candidate_budgets(tables: Sequence[Table], *, left_bytes: int) -> list[int]:
    """Budgets to try, smallest first: shares of the tables that fit into the memory that is left."""
    whole = sum(map(table_bytes, tables))
    smallest_row = min(table_bytes(table) // table.num_rows for table in tables)
    sizes = sorted({min(int(share * whole), left_bytes) for share in SHARES})
    return [size for size in sizes if size >= smallest_row]


def best_choice(budgets: Sequence[int], choose: Callable[[int], HotChoice]) -> HotChoice | None:
    """The hot set with the highest predicted speed-up, the smallest of equals; None without a budget."""
    found = [choose(budget) for budget in budgets]
    return max(found, key=lambda choice: choice.hot_set.expected_speed_up, default=None)
