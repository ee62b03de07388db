"""What a chunk is found by: its key, its content and what it depends on, new ones in small tables.

Digests come in no order, so that each that enters a large table changes a page of its own. In a small one they share
pages; from there they are moved many at a time and in the order of the large one, which changes each of its pages once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from . import faults

__all__ = [
    "BEHIND",
    "CONTENT_IS",
    "KEY_IS",
    "LOST",
    "MERGE_EVERY",
    "STATEMENTS",
    "STRAYS",
    "drop_strays",
    "fill",
    "merge",
    "one_of",
]

MERGE_EVERY = 131_072
"""The small tables are emptied whenever as many chunks have been entered."""


def _key_is(key: str) -> str:
    entry = f"SELECT chunk FROM {{}} WHERE head = substr({key}, 1, 16)"
    return f"c.id = coalesce(({entry.format('recent_keys')}), ({entry.format('keys')}))"


def _has_content(namespace: str, content: str) -> str:
    entry = f"SELECT chunk FROM {{}} WHERE namespace = {namespace} AND head = substr({content}, 1, 8)"
    return f"{entry.format('recent_contents')} UNION ALL {entry.format('contents')}"


KEY_IS = f"{_key_is('?1')} AND c.key = ?1"
"""The condition by which a chunk ``c`` is found; the key is the statement's first parameter."""
_NAMESPACE = "(SELECT id FROM namespaces WHERE name = ?2)"
CONTENT_IS = f"c.id IN ({_has_content(_NAMESPACE, '?1')}) AND c.content = ?1 AND c.namespace = {_NAMESPACE}"
"""The same for a content and the name of a namespace, the first and the second parameter."""
_BEHIND = "SELECT chunk FROM {} WHERE content = ?1"
_BEHIND_ANY = f"{_BEHIND.format('recent_dependencies')} UNION ALL {_BEHIND.format('dependencies')}"
BEHIND = f"c.id IN ({_BEHIND_ANY}) AND c.namespace = {_NAMESPACE}"
"""The condition for a chunk that was compiled behind a content, with the same parameters."""
LOST = f"(coalesce({_key_is('c.key')}, 0) = 0 OR c.id NOT IN ({_has_content('c.namespace', 'c.content')}))"
"""The condition for a chunk ``c`` that is not found by its key or by its content."""

_ENTER = """
        INSERT OR REPLACE INTO recent_keys VALUES (substr(NEW.key, 1, 16), NEW.id);
        INSERT OR IGNORE INTO recent_contents VALUES (NEW.namespace, substr(NEW.content, 1, 8), NEW.id);
"""
_LEAVE = """
        DELETE FROM recent_keys WHERE head = substr(OLD.key, 1, 16) AND chunk = OLD.id;
        DELETE FROM keys WHERE head = substr(OLD.key, 1, 16) AND chunk = OLD.id;
        DELETE FROM recent_contents
            WHERE namespace = OLD.namespace AND head = substr(OLD.content, 1, 8) AND chunk = OLD.id;
        DELETE FROM contents WHERE namespace = OLD.namespace AND head = substr(OLD.content, 1, 8) AND chunk = OLD.id;
"""
_FORGET = """
        DELETE FROM recent_dependencies WHERE chunk = OLD.id;
"""
_OF_ITS_KEY = _key_is("NEW.key")
_ONCE = f"""
        SELECT RAISE(ABORT, 'a chunk of this key is there') FROM chunks c
            WHERE {_OF_ITS_KEY} AND c.key = NEW.key AND c.id != NEW.id;
"""
# No two keys share 128 bits; contents may share 64.
_KEYS = "(head BLOB PRIMARY KEY, chunk INTEGER NOT NULL) WITHOUT ROWID"
_CONTENTS = "(namespace INTEGER, head BLOB, chunk INTEGER, PRIMARY KEY (namespace, head, chunk)) WITHOUT ROWID"
STATEMENTS = (
    f"CREATE TABLE recent_keys {_KEYS}",
    f"CREATE TABLE keys {_KEYS}",
    f"CREATE TABLE recent_contents {_CONTENTS}",
    f"CREATE TABLE contents {_CONTENTS}",
    "CREATE TABLE recent_dependencies (content BLOB NOT NULL, chunk INTEGER NOT NULL, PRIMARY KEY (content, chunk)) "
    "WITHOUT ROWID",
    "CREATE INDEX recent_dependencies_by_chunk ON recent_dependencies (chunk)",
    f"CREATE TRIGGER keys_enter AFTER INSERT ON chunks BEGIN {_ONCE}{_ENTER} END",
    f"CREATE TRIGGER keys_leave AFTER DELETE ON chunks BEGIN {_LEAVE}{_FORGET} END",
    "CREATE TRIGGER keys_change AFTER UPDATE OF id, key, namespace, content ON chunks "
    f"BEGIN {_LEAVE}{_ONCE}{_ENTER} END",
)
"""Make the tables, and triggers by which they follow the chunks."""
_MERGE = (
    "INSERT OR REPLACE INTO keys SELECT head, chunk FROM recent_keys ORDER BY head",
    "DELETE FROM recent_keys",
    "INSERT OR IGNORE INTO contents SELECT namespace, head, chunk FROM recent_contents ORDER BY namespace, head, chunk",
    "DELETE FROM recent_contents",
    "INSERT OR IGNORE INTO dependencies SELECT content, chunk FROM recent_dependencies ORDER BY content, chunk",
    "DELETE FROM recent_dependencies",
)
_NO_KEY = "NOT EXISTS (SELECT 1 FROM chunks c WHERE c.id = e.chunk AND substr(c.key, 1, 16) = e.head)"
_NO_CONTENT = (
    "NOT EXISTS (SELECT 1 FROM chunks c WHERE c.id = e.chunk AND c.namespace = e.namespace "
    "AND substr(c.content, 1, 8) = e.head)"
)
_STRAYS = (
    f"recent_keys AS e WHERE {_NO_KEY}",
    f"keys AS e WHERE {_NO_KEY}",
    f"recent_contents AS e WHERE {_NO_CONTENT}",
    f"contents AS e WHERE {_NO_CONTENT}",
)
STRAYS = "SELECT " + " + ".join(f"(SELECT count(*) FROM {strays})" for strays in _STRAYS)
"""Count the entries that lead to no chunk, or to another."""
_FILL = (
    "INSERT OR REPLACE INTO keys SELECT substr(key, 1, 16), id FROM chunks ORDER BY 1, 2",
    "INSERT OR IGNORE INTO contents SELECT namespace, substr(content, 1, 8), id FROM chunks ORDER BY 1, 2, 3",
)


def one_of(count: int) -> str:
    """The condition for chunks ``c`` whose keys begin as one of the first parameters, 16 bytes each."""
    heads = ", ".join(f"?{number + 1}" for number in range(count))
    entry = f"SELECT chunk FROM {{}} WHERE head IN ({heads})"
    return f"c.id IN ({entry.format('recent_keys')} UNION ALL {entry.format('keys')})"


def merge(db: sqlite3.Connection) -> None:
    """Move what is in the small tables into the large ones; inside a transaction."""
    faults.point("indices.merging")
    _run(db, _MERGE)
    faults.point("indices.merged")


def drop_strays(db: sqlite3.Connection) -> None:
    """Remove the entries that lead to no chunk, or to another; inside a transaction."""
    _run(db, [f"DELETE FROM {strays}" for strays in _STRAYS])


def fill(db: sqlite3.Connection) -> None:
    """Enter all chunks in tables that are empty; inside a transaction."""
    _run(db, _FILL)


def _run(db: sqlite3.Connection, statements: Sequence[str]) -> None:
    for statement in statements:
        db.execute(statement)
