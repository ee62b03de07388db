"""``epic-rag store``. Registered by :mod:`epic_rag.cli`; heavy modules are imported when a command runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from epic_engine.memory.budget import format_bytes, parse_size

from epic_rag.cli_options import JsonOption, StoreOption, YesOption
from epic_rag.console import err, out, stage_progress
from epic_rag.console_store import chunks_table, documents_table, stats_tables, verify_lines
from epic_rag.store_folder import StoreFolder

__all__ = ["store_app"]

store_app = typer.Typer(help="Look into a store, check it, tidy it, move chunks between stores.", no_args_is_help=True)

NamespaceOption = Annotated[str | None, typer.Option("--namespace", help="Only what belongs to this namespace.")]
OneNamespaceOption = Annotated[str, typer.Option("--namespace", help="The namespace.")]
DocOption = Annotated[list[str], typer.Option("--doc", help="A document, as `store ls` names it; repeatable.")]
SizeArgument = Annotated[str, typer.Argument(metavar="SIZE|none", help="Such as 8GiB or 500MB, or none.")]


def _folder(path: Path, *, write: bool = False, new: bool = False) -> StoreFolder:
    folder = StoreFolder(path.expanduser(), write=write)
    if not new and not folder.is_store:
        raise typer.BadParameter(f"{path} is no store: it holds no documents, texts or chunks.", param_hint="--store")
    return folder


def _show(facts: Any, as_json: bool, lines: Iterable[Any]) -> None:
    """One JSON value, or the lines and tables that people read."""
    if as_json:
        # Plain print: rich would wrap long lines to the terminal.
        print(json.dumps(facts, ensure_ascii=False))
        return
    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=isinstance(line, str))


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    # Not with input()'s own prompt: that goes to standard output, where JSON is expected.
    err.print(f"{question} [y/N] ", end="", markup=False, highlight=False)
    try:
        answer = input()
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        err.print("nothing was changed.")
        raise typer.Exit(1)


# -- looking ---------------------------------------------------------------------------------------------------


@store_app.command("ls")
def store_ls(
    store: StoreOption,
    chunks: Annotated[bool, typer.Option("--chunks", help="List compiled chunks instead.")] = False,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="Only documents, or compiled chunks, of this namespace.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most lines.")] = 1000,
    as_json: JsonOption = False,
) -> None:
    """List documents and texts, or compiled chunks."""
    with _folder(store) as folder:
        # One more than asked for tells whether there are more.
        if chunks:
            rows = folder.listed_chunks(limit + 1, namespace)
        else:
            rows = list(islice(folder.documents(namespace), limit + 1))
    more = len(rows) > limit
    rows = rows[:limit]
    _show(rows, as_json, [chunks_table(rows) if chunks else documents_table(rows)])
    if more:
        err.print(f"only the first {limit} are listed: raise --limit for more.", highlight=False)


@store_app.command("stats")
def store_stats(store: StoreOption, as_json: JsonOption = False) -> None:
    """Count documents, chunks, tokens and bytes; show limits."""
    with _folder(store) as folder, err.status("counting …"):
        facts = folder.facts()
    _show(facts, as_json, stats_tables(facts))


@store_app.command("verify")
def store_verify(
    store: StoreOption,
    quick: Annotated[bool, typer.Option("--quick", help="Compare headers and sizes; read no KV.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged or unnamed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare every compiled chunk with its checksum; exit code 1 if something is wrong."""
    with _folder(store, write=repair) as folder:
        chunks = folder.chunks()
        total = chunks.usage().chunks
        with stage_progress("chunks") as progress:
            report = chunks.verify(repair=repair, quick=quick, progress=lambda done: progress(done, total))
        absent = folder.not_compiled()
    repaired = repair and not report.clean
    facts = {**vars(report), "not_compiled": absent, "clean": report.clean, "repaired": repaired}
    _show(facts, as_json, verify_lines(facts))
    if not report.clean and not repair:
        raise typer.Exit(1)


# -- what goes -------------------------------------------------------------------------------------------------


@store_app.command("rm")
def store_rm(
    doc_ids: Annotated[list[str], typer.Argument(help="Documents or texts, as `store ls` names them.")],
    store: StoreOption,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget documents or texts and the KV that no other shares."""
    forgotten = []
    with _folder(store, write=True) as folder:
        for given in doc_ids:
            for documents, ids in folder.find(given, namespace):
                forgotten += [{"doc_id": i, "freed_chunks": folder.forget(documents, i)} for i in ids]
    lines = [f"forgot {row['doc_id']}: {row['freed_chunks']} compiled chunks freed" for row in forgotten]
    _show(forgotten, as_json, lines)


@store_app.command("erase")
def store_erase(
    store: StoreOption, namespace: OneNamespaceOption, yes: YesOption = False, as_json: JsonOption = False
) -> None:
    """Forget every compiled chunk, document and text of a namespace, and rewrite the files that held its KV."""
    with _folder(store, write=True) as folder:
        _confirm(f"erase everything of namespace {namespace!r} in {store}?", yes)
        documents = folder.forget_all(namespace)
        chunks = folder.chunks().erase_namespace(namespace)
        with stage_progress("rewriting files") as progress:
            freed = folder.chunks().compact(live_share=1.0, progress=progress)
    facts = {"namespace": namespace, "documents": documents, "chunks": chunks, "freed_bytes": freed}
    _show(
        facts, as_json, [f"erased {documents} documents and {chunks} compiled chunks, {format_bytes(freed)} given back"]
    )


@store_app.command("gc")
def store_gc(store: StoreOption, as_json: JsonOption = False) -> None:
    """Remove what is expired, and files and entries that nothing needs."""
    with _folder(store, write=True) as folder, err.status("collecting …"):
        report = folder.chunks().gc()
    _show(
        vars(report),
        as_json,
        [
            f"{report.expired} expired chunks, {len(report.files)} files, {report.quarantined} damaged chunks and "
            f"{report.leases} leases removed, {format_bytes(report.nbytes)} given back"
        ],
    )


@store_app.command("compact")
def store_compact(
    store: StoreOption,
    live_share: Annotated[
        float,
        typer.Option(min=0, max=1, help="Rewrite files of which less is needed; 1: all with anything deleted in them."),
    ] = 0.5,
    as_json: JsonOption = False,
) -> None:
    """Give the bytes of deleted chunks back to the disk."""
    with _folder(store, write=True) as folder, stage_progress("rewriting files") as progress:
        freed = folder.chunks().compact(live_share=live_share, progress=progress)
    _show({"freed_bytes": freed}, as_json, [f"{format_bytes(freed)} given back"])


# -- what stays ------------------------------------------------------------------------------------------------


@store_app.command("pin")
def store_pin(
    store: StoreOption, doc: DocOption, namespace: NamespaceOption = None, as_json: JsonOption = False
) -> None:
    """Never evict what was compiled of documents."""
    _pin(store, doc, namespace, as_json, pinned=True)


@store_app.command("unpin")
def store_unpin(
    store: StoreOption, doc: DocOption, namespace: NamespaceOption = None, as_json: JsonOption = False
) -> None:
    """Let what was compiled of documents be evicted again."""
    _pin(store, doc, namespace, as_json, pinned=False)


def _pin(store: Path, docs: list[str], namespace: str | None, as_json: bool, *, pinned: bool) -> None:
    with _folder(store, write=True) as folder:
        keys = list(dict.fromkeys(key for doc in docs for key in folder.forms(doc, namespace)))
        count = folder.chunks().pin(keys) if pinned else folder.chunks().unpin(keys)
    _show({"chunks": count, "pinned": pinned}, as_json, [f"{count} chunks {'pinned' if pinned else 'unpinned'}"])


def _size_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else parse_size(text)


@store_app.command("quota")
def store_quota(
    size: SizeArgument, store: StoreOption, namespace: OneNamespaceOption, as_json: JsonOption = False
) -> None:
    """Limit what a namespace may take; from the next chunk on its own least worthy chunks are evicted for new ones."""
    limit = _size_or_none(size)
    with _folder(store, write=True) as folder:
        folder.chunks().set_quota(namespace, limit)
    shown = "none" if limit is None else format_bytes(limit)
    _show({"namespace": namespace, "quota_bytes": limit}, as_json, [f"quota of namespace {namespace!r}: {shown}"])


@store_app.command("budget")
def store_budget(size: SizeArgument, store: StoreOption, as_json: JsonOption = False) -> None:
    """Limit what all chunks may take; from the next chunk on the least worthy are evicted for new ones."""
    limit = _size_or_none(size)
    with _folder(store, write=True) as folder:
        folder.chunks().set_budget(limit)
    _show({"budget_bytes": limit}, as_json, [f"budget: {'none' if limit is None else format_bytes(limit)}"])


# -- in and out ------------------------------------------------------------------------------------------------


@store_app.command("export")
def store_export(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Directory for the safetensors files.")],
    store: StoreOption,
    namespace: NamespaceOption = None,
    doc: Annotated[
        list[str] | None, typer.Option("--doc", help="Only what was compiled of this document; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write compiled chunks as safetensors files; exit code 1 if some could not be read."""
    from epic_engine.storage.exchange import export_chunks

    with _folder(store) as folder, stage_progress("chunks") as progress:
        keys = None if not doc else list(dict.fromkeys(key for d in doc for key in folder.forms(d, namespace)))
        report = export_chunks(folder.chunks(), path, keys=keys, namespace=namespace, progress=progress)
    lines = [f"{report.chunks} chunks in {len(report.files)} files, {format_bytes(report.nbytes)}"]
    _show(vars(report), as_json, [*lines, *(f"missing: {key}" for key in report.missing)])
    if report.missing:
        raise typer.Exit(1)


@store_app.command("import")
def store_import(
    path: Annotated[Path, typer.Argument(help="Directory of an export, or one of its files.")],
    store: StoreOption,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take exported chunks into a store, which is made if it is not there; exit code 1 if some are damaged."""
    from epic_engine.storage.exchange import import_chunks

    with _folder(store, write=True, new=True) as folder, stage_progress("chunks") as progress:
        report = import_chunks(folder.new_chunks(), path, namespace=namespace, progress=progress)
    lines = [f"{report.chunks} chunks imported, {report.known} known already, {report.skipped} of other namespaces"]
    _show(vars(report), as_json, [*lines, *(f"{name}: {why}" for name, why in report.problems)])
    if report.problems:
        raise typer.Exit(1)


@store_app.command("publish")
def store_publish(
    url: Annotated[str, typer.Argument(help="Where to, such as s3://bucket/folder.")],
    store: StoreOption,
    namespace: Annotated[
        list[str] | None, typer.Option("--namespace", help="Only chunks of this one; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy documents and compiled chunks to where other machines read them; exit code 1 if some are damaged.

    What they lack is copied, what the store has lost is removed there. Credentials and endpoints are fsspec's.
    """
    from epic_engine.storage.publish import publish

    from epic_rag.publishing import publish_corpus

    with _folder(store, write=True) as folder, stage_progress("chunks") as progress:
        if namespace or folder.chunks_path == folder.path:
            report = publish(folder.chunks(), url, namespaces=namespace or None, progress=progress)
        else:
            folder.format()  # says what is wrong with the chunks, if there are none
            report = publish_corpus(folder.path, url, progress=progress)
    lines = [
        f"{report.chunks} chunks published in {report.files} files, {format_bytes(report.nbytes)}; "
        f"{report.removed} removed"
    ]
    _show(vars(report), as_json, [*lines, *(f"damaged: {key}" for key in report.damaged)])
    if report.damaged:
        raise typer.Exit(1)


# -- mending ---------------------------------------------------------------------------------------------------


@store_app.command("migrate")
def store_migrate(
    store: StoreOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring a store of an older version up to date."""
    with _folder(store, write=True) as folder, err.status("bringing the store up to date …"):
        before = folder.format()
        outdated = before.version < before.newest
        aside = 0
        if before.version > before.newest or (outdated and not dry_run):
            aside = folder.chunks().usage().quarantined
    facts = {
        "from": before.version,
        "to": before.newest,
        "chunks": before.chunks,
        "unreadable_chunks": aside,
        "dry_run": dry_run,
    }
    if not outdated:
        line = f"format {before.version} is up to date"
    elif dry_run:
        line = f"format {before.version} would become {before.newest}: {before.chunks} chunks"
    else:
        line = f"format {before.version} became {before.newest}: {before.chunks} chunks, {aside} of them unreadable"
    _show(facts, as_json, [line])


@store_app.command("rebuild")
def store_rebuild(store: StoreOption, yes: YesOption = False, as_json: JsonOption = False) -> None:
    """Make a new catalogue from the files of chunks, where it is damaged or lost; nobody may use the store."""
    from epic_engine.storage.rebuild import rebuild

    with _folder(store) as folder:
        _confirm(
            f"make a new catalogue for {folder.chunks_path}? Deleted chunks whose bytes are still there come back; "
            "pins, quotas and uses are lost. The old one is kept until `store gc`.",
            yes,
        )
        with err.status("reading every chunk …"):
            count = rebuild(folder.chunks_path)
    _show({"chunks": count}, as_json, [f"{count} chunks found"])
