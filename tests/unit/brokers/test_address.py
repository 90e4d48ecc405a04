"""The three forms of a Redis address."""

from __future__ import annotations

import pytest

from brokers.address import Layout, Node, parse
from brokers.errors import ConfigurationError


def test_one_server_keeps_its_url_as_it_is() -> None:
    url = "rediss://user:p%40ss@host:6390/2?ssl_cert_reqs=none"
    assert (parse(url).layout, parse(url).url) == (Layout.ONE, url)


def test_a_sentinel_group_names_its_service_and_database() -> None:
    at = parse(
        "redis+sentinel://me:p%40ss@one:26379,two,[::1]:5/service/3?sentinel_password=s%26s&health_check_interval=5"
    )
    assert (at.layout, at.service, at.db) == (Layout.SENTINEL, "service", 3)
    assert at.nodes == (Node("one", 26379), Node("two", 26379), Node("::1", 5))
    assert at.sentinel_login == ("", "s&s")
    assert at.at(Node("data", 6379)) == "redis://me:p%40ss@data:6379/3?health_check_interval=5"


def test_a_service_may_look_like_a_number() -> None:
    assert parse("redis+sentinel://one/7").service == "7"
    assert (parse("redis+sentinel://one/7/1").service, parse("redis+sentinel://one/7/1").db) == ("7", 1)


def test_a_cluster_over_tls_reaches_each_node_over_tls() -> None:
    at = parse("rediss+cluster://:secret@one:1,two")
    assert (at.layout, at.nodes) == (Layout.CLUSTER, (Node("one", 1), Node("two", 6379)))
    assert at.at(Node("::1", 7)) == "rediss://:secret@[::1]:7/0"


@pytest.mark.parametrize(
    "url",
    [
        "http://:secret@host",
        "redis+cluster://:secret@host:1/2",
        "redis+cluster://:secret@host:port",
        "redis+cluster://:secret@,host:1",
        "redis+sentinel://:secret@host:1",
        "redis+sentinel://:secret@host:1/a/b/0",
        "redis+tls://:secret@host",
    ],
)
def test_a_bad_address_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse(url)
    assert "secret" not in refused.value.message + refused.value.advice
