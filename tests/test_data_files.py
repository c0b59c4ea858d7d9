"""`FileDataset`: supported files, and error messages for files that cannot be read."""

import csv
import json
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest

from rlcore.data.files import FileDataset
from rlcore.errors import DataError, UserError

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}, {"question": "3+3?", "answer": "6"}]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path):
    path.write_text(json.dumps(ROWS), encoding="utf-8")


def write_csv(path):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path):
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), path)


def write_arrow(writer):
    def write(path):
        table = pa.Table.from_pylist(ROWS)
        with pa.OSFile(str(path), "wb") as sink, writer(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)

    return write


def message(spec, **options):
    with pytest.raises(DataError) as caught:
        FileDataset(str(spec), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_jsonl),
        ("a.json", write_json),
        ("lines.json", write_jsonl),
        ("a.csv", write_csv),
        ("a.parquet", write_parquet),
        ("file.arrow", write_arrow(pa.ipc.new_file)),
        ("stream.arrow", write_arrow(pa.ipc.new_stream)),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, name, write):
    write(tmp_path / name)

    dataset = FileDataset(str(tmp_path / name))

    assert [dataset[index] for index in range(len(dataset))] == ROWS
    assert dataset.columns == ["question", "answer"]
    assert dataset.name == str(tmp_path / name)


def test_a_table_of_text_has_its_texts_objects_and_gaps(tmp_path):
    path = tmp_path / "a.csv"
    messages = [{"role": "user", "content": "Who, me?"}]
    cells = ['"two, lines\nand ""quotes"""', '"' + json.dumps(messages).replace('"', '""') + '"', "[1] as text", "{x}"]
    path.write_bytes(("\ufeffprompt,chat,note,set\r\n" + ",".join(cells) + '\r\n\r\nb,,"[1, 2]",[]\r\n').encode())

    dataset = FileDataset(str(path))

    assert dataset.columns == ["prompt", "chat", "note", "set"]
    assert [dataset[0], dataset[1]] == [
        {"prompt": 'two, lines\nand "quotes"', "chat": messages, "note": "[1] as text", "set": "{x}"},
        {"prompt": "b", "chat": None, "note": "[1, 2]", "set": "[]"},
    ]
    assert [dataset.where(0), dataset.where(1)] == [f"{path}:2", f"{path}:5"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n1,2,3\n", ":3: 3 values for the 2 columns a, b\nQuote a value that has a comma"),
        ("a,b\n1\n", ":2: 1 values for the 2 columns a, b\nQuote"),
        ("a,a\n1,2\n", ":1: two columns have the same name: a, a\nRename one"),
        ('a,b\n1,"2\n3,4\n', ":2: not valid CSV: unexpected end of data\nWrite a quote within quotes twice."),
        ("a,b\n", " has no rows"),
        ("", " has no rows"),
        ("a\n" + '"' + '[{""x"": ' + "[" * 80 + "]" * 80 + '}]"\n', ":2: nests lists and objects more than 64 deep"),
    ],
    ids=["many", "few", "twice", "quote", "header", "empty", "deep"],
)
def test_a_broken_table_of_text_is_named_with_its_line(tmp_path, text, problem):
    path = tmp_path / "a.csv"
    path.write_text(text)

    assert message(path).startswith(f"{path}{problem}")


def test_a_table_of_text_may_have_long_values_and_must_be_utf8(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "x" * 200_000 + ",1\n")
    assert len(FileDataset(str(path))[0]["a"]) == 200_000
    assert csv.field_size_limit() == 131_072

    path.write_bytes(b"a\n\xe9\n")
    assert message(path).endswith("invalid continuation byte\nSave the file as UTF-8.")


def test_keys_that_differ_are_united_and_filled_with_none(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": 1}, {"b": 2, "a": 3}, {"c": 4}])

    dataset = FileDataset(str(path))

    assert dataset.columns == ["a", "b", "c"]
    assert [dataset[0], dataset[2]] == [{"a": 1, "b": None, "c": None}, {"a": None, "b": None, "c": 4}]


def test_nested_parquet_values_become_plain_python(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    pa.parquet.write_table(pa.Table.from_pylist([{"prompt": messages}]), tmp_path / "a.parquet")

    assert FileDataset(str(tmp_path / "a.parquet"))[0] == {"prompt": messages}


def test_only_a_newline_ends_a_line_and_blank_lines_are_ignored(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"a": "x\u2028y"}\r\n\n{"a": 2}'.encode())

    dataset = FileDataset(str(path))

    assert [dataset[0]["a"], dataset[1]["a"]] == ["x\u2028y", 2]
    assert [dataset.where(0), dataset.where(1)] == [f"{path}:1", f"{path}:3"]


@pytest.mark.parametrize("spec", ["{0}/b.jsonl, {0}/a.jsonl", "{0}/*.jsonl", "{0}"], ids=["list", "glob", "directory"])
def test_several_files_are_read_as_named_or_sorted(tmp_path, spec):
    write_jsonl(tmp_path / "a.jsonl", [{"n": 1}, {"n": 2}])
    write_jsonl(tmp_path / "b.jsonl", [{"n": 3}])

    dataset = FileDataset(spec.format(tmp_path))

    listed = spec.startswith("{0}/b")
    assert [dataset[index]["n"] for index in range(3)] == ([3, 1, 2] if listed else [1, 2, 3])
    assert dataset.where(2) == (f"{tmp_path}/a.jsonl:2" if listed else f"{tmp_path}/b.jsonl:1")


def test_a_file_whose_name_has_a_comma_is_one_file(tmp_path):
    path = write_jsonl(tmp_path / "a,b[1].jsonl")

    assert len(FileDataset(str(path))) == 3


def test_where_of_a_table_counts_rows_from_one(tmp_path):
    write_parquet(tmp_path / "a.parquet")

    assert FileDataset(str(tmp_path / "a.parquet")).where(2) == f"{tmp_path}/a.parquet, row 3"


def test_saved_hugging_face_dataset_is_read_without_its_caches(tmp_path):
    write = write_arrow(pa.ipc.new_stream)
    for name in ("data-00000-of-00002.arrow", "data-00001-of-00002.arrow", "cache-5f.arrow"):
        write(tmp_path / name)
    shards = [{"filename": f"data-0000{index}-of-00002.arrow"} for index in (0, 1)]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": shards}))
    (tmp_path / "dataset_info.json").write_text("{}")

    assert len(FileDataset(str(tmp_path))) == 6


def test_saved_dataset_with_splits_asks_for_one(tmp_path):
    (tmp_path / "dataset_dict.json").write_text("{}")
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()

    assert message(tmp_path) == (
        f"'{tmp_path}' holds several splits: test, train\nWrite one of them, such as '{tmp_path}/test'."
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"a": 1', ": not valid JSON: Expecting ',' delimiter at character 8"),
        ("[1, 2]", ": a list, not an object"),
        ("null", ": a NoneType, not an object"),
    ],
    ids=["broken", "list", "null"],
)
def test_bad_line_is_named_with_its_number(tmp_path, line, problem):
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": 1}\n\n' + line + "\n")

    assert message(path) == (
        f'{path}:3{problem}\nEach line must be one JSON object: {{"prompt": "..."}}. Correct the line or remove it.'
    )


def test_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"a": "\xe9"}\n')

    assert message(path) == f"{path}:1: not UTF-8: invalid continuation byte\nSave the file as UTF-8."


@pytest.mark.parametrize(
    ("content", "problem"),
    [("[{}", "not valid JSON"), ("[{}, 3]", "row 2: a int, not an object")],
    ids=["broken", "number"],
)
def test_bad_json_list_is_refused(tmp_path, content, problem):
    (tmp_path / "a.json").write_text(content)

    assert problem in message(tmp_path / "a.json")


def nested(depth):
    return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


@pytest.mark.parametrize("depth", [65, 900, 100_000])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_rows_that_nest_too_deeply_are_refused(tmp_path, name, depth):
    path = tmp_path / name
    rows = ['{"a": 1}', nested(depth)]
    path.write_text("\n".join(rows) if name == "a.jsonl" else f"[{', '.join(rows)}]")

    first, second = message(path).splitlines()

    assert first.endswith("nests lists and objects more than 64 deep")
    assert first.startswith(f"{path}:2: " if name == "a.jsonl" else str(path))
    assert second == "Write that value as text, or remove the row."


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_rows_may_nest_64_deep_and_be_wide(tmp_path, name):
    path = tmp_path / name
    rows = [nested(64), '{"a": [' + ", ".join(["[]"] * 100) + "]}"]
    path.write_text("\n".join(rows) if name == "a.jsonl" else f"[{', '.join(rows)}]")

    assert len(FileDataset(str(path))) == 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_number_of_thousands_of_digits_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"a": %s}' % ("9" * 5000) if name == "a.jsonl" else '[{"a": %s}]' % ("9" * 5000))

    assert "not valid JSON: Exceeds the limit" in message(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_damaged_table_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"not a table at all")

    assert message(tmp_path / name).startswith(f"{tmp_path}/{name}: not a .{name.split('.')[1]} file: ")


def test_missing_file_suggests_the_nearest_name(tmp_path):
    write_jsonl(tmp_path / "train.jsonl")

    first = message(tmp_path / "trian.jsonl").splitlines()[0]

    assert first == f"no such file: '{tmp_path}/trian.jsonl' in '{tmp_path}'. Did you mean 'train.jsonl'?"


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("{0}/no/a.jsonl", "no such file: '{0}/no/a.jsonl'; there is no directory '{0}/no' either"),
        ("{0}/*.parquet", "no file matches '{0}/*.parquet'"),
        ("{0}", "'{0}' holds no file that can be read"),
        (" , ", "the path of a dataset is empty"),
        ("{0}/a.txt", "{0}/a.txt: cannot read files that end in '.txt'."),
        ("{0}/a.parqet", "{0}/a.parqet: cannot read files that end in '.parqet'. Did you mean '.parquet'?"),
    ],
    ids=["no directory", "no match", "empty directory", "nothing", "unknown kind", "misspelled kind"],
)
def test_path_without_data_is_refused_with_the_accepted_formats(tmp_path, spec, problem):
    if spec.startswith("{0}/a."):
        (tmp_path / spec[4:]).write_text("x")

    first, second = message(spec.format(tmp_path)).splitlines()

    assert first == problem.format(tmp_path)
    assert second.startswith("Write a .jsonl, .json, .csv, .parquet or .arrow file")


def test_directory_of_several_kinds_asks_for_a_glob(tmp_path):
    write_jsonl(tmp_path / "a.jsonl")
    write_parquet(tmp_path / "a.parquet")

    assert message(tmp_path) == (
        f"'{tmp_path}' holds files of several kinds: .jsonl, .parquet\n"
        f"Write a glob that chooses, such as '{tmp_path}/*.parquet'."
    )


@pytest.mark.parametrize("content", ["", "\n\n"], ids=["no bytes", "blank lines"])
def test_empty_file_is_refused_even_with_a_nonempty_one(tmp_path, content):
    write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text(content)

    assert message(tmp_path).startswith(f"{tmp_path}/b.jsonl has no rows\n")


def test_without_pyarrow_the_package_to_install_is_named(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)

    with pytest.raises(UserError) as caught:
        FileDataset(str(tmp_path / "a.parquet"))

    assert str(caught.value).splitlines()[1] == "Type  pip install 'rlcore[parquet]'"
