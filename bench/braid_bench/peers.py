"""The ways of replication that are compared: native logical replication and Braid, each in variants.

A variant is what is said when the subscription is created and what is set on the subscriber's server. One that the installed
PostgreSQL or Braid refuses is not available, which is no failure.
"""

from dataclasses import dataclass, field

from .plan import Mistake
from .stage import Failed

# undefined function (no such argument), undefined object (no such setting), feature not supported,
# invalid parameter value
REFUSALS = ("42883", "42704", "0A000", "22023")


class NotAvailable(Exception):
    """The installed version does not have this variant."""


@dataclass(frozen=True)
class Variant:
    """One way to run a subscription. `options` are SQL texts by argument, `settings` lines of the subscriber's configuration."""

    name: str
    peer: str
    title: str
    options: dict = field(default_factory=dict)
    settings: tuple = ()
    # Commits may overtake each other: the last row's being there does not say that all are.
    relaxed: bool = False

    @property
    def native(self):
        return self.peer == "native"


def _braid(name, title, relaxed=False, settings=(), **options):
    return Variant(name, "braid", title, options, settings, relaxed)


NATIVE = {
    "best": Variant("native", "native", "native, streaming = parallel, binary",
                    {"binary": "true", "streaming": "parallel"}),
    "default": Variant("native-default", "native", "native, default settings"),
}
BRAID = {
    variant.name: variant
    for variant in (
        _braid("parallel", "Braid, default settings"),
        _braid("serial", "Braid, serial", apply_mode="'serial'"),
        _braid("batch", "Braid, batch", apply_mode="'batch'"),
        _braid("aggregate", "Braid, aggregate", apply_mode="'aggregate'"),
        _braid("consolidate", "Braid, default with consolidate", consolidate="true"),
        _braid("batch+consolidate", "Braid, batch with consolidate", apply_mode="'batch'", consolidate="true"),
        _braid("kept", "Braid, what is large kept until it commits", streaming="'on'"),
        _braid("whole", "Braid, what is large sent once it has committed", streaming="'off'"),
        _braid("relaxed", "Braid, relaxed commit order", relaxed=True, commit_order="'relaxed'"),
        _braid("batch+relaxed", "Braid, batch in relaxed commit order", relaxed=True, apply_mode="'batch'",
               commit_order="'relaxed'"),
    )
}
SLOT = "bench"


def check(plan):
    """That there are the variants that were asked for."""
    for setting, asked, there in (("BENCH_MODES", plan.modes, BRAID), ("BENCH_NATIVE", getattr(plan, "native", ()), NATIVE)):
        if missing := [name for name in asked if name not in there]:
            raise Mistake(f"{setting}: there is no {', '.join(missing)}; there is {', '.join(there)}")


def create(variant, commit, subscriber, provider_dsn, plan, major):
    """A subscription on a subscriber that has the tables and their rows, disabled, over the slot that is there."""
    options = dict(variant.options)
    try:
        if variant.native:
            if major < 16 and options.get("streaming") == "parallel":
                options["streaming"] = "on"
            options.update(
                enabled="false", create_slot="false", slot_name=f"'{SLOT}'", copy_data="false", synchronous_commit=f"'{commit}'")
            listed = ", ".join(f"{key} = {value}" for key, value in options.items())
            subscriber.ask(f"create subscription {SLOT} connection '{provider_dsn}' publication bench with ({listed})")
            return
        for line in variant.settings:
            name = line.partition("=")[0].strip()
            if subscriber.ask(f"select count(*) from pg_settings where name = '{name}'") == "0":
                raise NotAvailable(f"there is no setting {name}")
        options = {
            "publications": "'{bench}'", "enabled": "false", "create_slot": "false", "slot_name": f"'{SLOT}'",
            "copy_data": "false", "synchronous_commit": f"'{commit}'", **options,
        }
        listed = ", ".join(f"{key} => {value}" for key, value in options.items())
        more = f", {plan.options}" if plan.options else ""
        subscriber.ask(f"select braid.create_subscription('{SLOT}', '{provider_dsn}', {listed}{more})")
    except Failed as failure:
        # What the plainest variant is refused is a fault of the set-up.
        if failure.state in REFUSALS and variant.options:
            reason = f"not all of {', '.join(variant.options)} are known" if failure.state == "42883" else str(failure)
            raise NotAvailable(reason.partition(" (SQLSTATE")[0]) from None
        raise


def switch(variant, subscriber, on):
    word = "enable" if on else "disable"
    subscriber.ask(f"alter subscription {SLOT} {word}" if variant.native else f"select braid.{word}_subscription('{SLOT}')")


def caught_up(variant, position):
    """SQL at the subscriber: everything up to there is applied. Only asked where the last row is not enough."""
    if variant.native:
        return f"(select coalesce(bool_or(latest_end_lsn >= '{position}'), false) from pg_stat_subscription)"
    return f"(select coalesce(applied_lsn >= '{position}', false) from braid.subscription_detail where name = '{SLOT}')"


def conflicts(variant, subscriber, major):
    if not variant.native:
        return int(subscriber.ask("select count(*) from braid.conflict_history"))
    if major < 18:
        return 0
    return int(subscriber.ask(
        "select sum(confl_insert_exists + confl_update_origin_differs + confl_update_missing"
        " + confl_delete_origin_differs + confl_delete_missing) from pg_stat_subscription_stats"))
