"""Tests of the chart, rendered by the real helm."""
