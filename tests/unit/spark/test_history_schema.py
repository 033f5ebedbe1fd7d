"""What the commit history can be read as."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from persist.core.errors import InvalidUsage
from persist.spark.metadata import HistoryReader


def test_some_of_its_columns_will_do() -> None:
    HistoryReader(Mock(), Mock(), StructType([StructField("who", StringType()), StructField("rows", LongType())]))


@pytest.mark.parametrize("field", [StructField("foo", IntegerType()), StructField("rows", StringType())])
def test_others_are_refused_and_not_met_as_a_key_error(field: StructField) -> None:
    with pytest.raises(InvalidUsage, match=f"readHistory has no column '{field.name}' of type"):
        HistoryReader(Mock(), Mock(), StructType([field]))
