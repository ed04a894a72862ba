"""Misuse of `acl`: every row of the C library's own table that can be said in Python.

The table is `bindings/acl/tests/misuse/rows.txt`, which the C library's test turns into a program.
Here its C expressions become Python's, in the same five states of a process. What cannot be said:
an output that is NULL, and a list or a dict whose length is not its own.
"""

import ctypes
import json
import os
import pathlib
import re
import sys
import threading

import pytest
from ascend_vmm import acl
from ascend_vmm.acl import _table
from conftest import MIB

C_LIBRARY = pathlib.Path(__file__).parents[2] / "acl"
ROWS, FACTS = C_LIBRARY / "tests" / "misuse" / "rows.txt", C_LIBRARY / "facts" / "acl-abi.json"

pytestmark = [
    pytest.mark.ascend_npu(generation="all", leaky=True),
    pytest.mark.skipif(not ROWS.exists(), reason="these tests run without the project's files"),
]

# Functions that are written by hand, with the kinds of `_table`; K is the room for a key, and a
# dot is an argument that the Python function does not have.
BY_HAND = {
    "aclInit": (lambda path: acl.init() if path is None else acl.init(path), "s"),
    "aclrtGetPrimaryCtxState": (acl.rt.get_primary_ctx_state, "i >u >i"),
    "aclrtIpcMemGetExportKey": (acl.rt.ipc_mem_get_export_key, "p p >K p p"),
    "aclrtGetMemUceInfo": (acl.rt.get_mem_uce_info, "i >E p >p"),
    "aclrtPeekAtLastError": (acl.rt.peek_at_last_error, "i"),
    "aclrtGetLastError": (acl.rt.get_last_error, "i"),
    "aclGetCannAttributeList": (acl.get_cann_attribute_list, ">p >p"),
    "aclrtLaunchCallback": (acl.rt.launch_callback, "f l i p"),
    "aclrtMemUceRepair": (acl.rt.mem_uce_repair, "i E ."),
}


def served():
    """The Python function and the kinds of each C function's arguments."""
    functions = {name: (function, kinds.split()) for name, (function, kinds) in BY_HAND.items()}
    for owner, table in [(acl, _table.ACL), (acl.rt, _table.RT)]:
        for line in table.strip().splitlines():
            name, c_name, *arguments = line.split()
            kinds = [kind if kind[0] == ">" else kind.partition(":")[2] or "p" for kind in arguments]
            functions.setdefault(c_name, (getattr(owner, name), kinds))
    return functions


def rows(section):
    """The line, the function, its arguments and the code of each row of a section."""
    here = False
    for line in ROWS.read_text().splitlines():
        if line.startswith("["):
            here = line == f"[{section}]"
        elif here and line and not line.startswith("#"):
            call, code = line.rsplit(" = ", 1)
            name, arguments = re.fullmatch(r"(\w+)\((.*)\)", call).groups()
            yield line, name, list(separated(arguments)), int(code)


def separated(arguments):
    """Arguments. A comma inside of parentheses does not separate them."""
    part, depth = "", 0
    for character in arguments + ",":
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            if part.strip():
                yield part.strip()
            part = ""
        else:
            part += character


class Unsayable(Exception):
    pass


class Program:
    """The state of the C program, and its rows as calls of Python's."""

    def __init__(self):
        facts = json.loads(FACTS.read_text())
        self.plain = ctypes.create_string_buffer(8192)
        self.names = {
            "NULL": None,
            "MIB": MIB,
            "HUGE_SIZE": (1 << 64) - 1,
            "NOWHERE": 0x17FF00000000,
            "plain": ctypes.addressof(self.plain),
            "nothing": lambda arguments: None,
            "FORGED": lambda kind: 0x5A00000000000000 | kind << 52 | 12345,
            "prop": self.prop,
            **dict(facts["macros"]),
        }
        for enumeration in facts["enums"]:
            self.names.update(enumeration["values"])
        self.served, self.wrong, self.compared, self.unsayable = served(), [], 0, []

    @staticmethod
    def prop(handle_type, allocation, attribute, place, number, reserve):
        location = {"type": place, "id": number}
        kind = {"handleType": handle_type, "allocationType": allocation, "memAttr": attribute}
        return {**kind, "location": location, "reserve": reserve}

    def must(self, answer):
        code = answer[-1] if isinstance(answer, tuple) else answer
        assert code == 0, acl.get_recent_err_msg()
        return answer[0] if isinstance(answer, tuple) else None

    def prepare(self):
        """What `prepare` of the C program makes: objects of every kind, alive and dead."""
        rt, names, must = acl.rt, self.names, self.must
        must(rt.set_device(0))
        names["dead_context"] = must(rt.create_context(1))
        names["dead_stream"] = must(rt.create_stream())
        must(rt.destroy_context(names["dead_context"]))
        must(rt.set_device(1))
        names["foreign_stream"] = must(rt.create_stream())
        must(rt.set_device(0))
        names["context"] = must(rt.get_context())
        names["stream"] = must(rt.create_stream())
        names["event"] = must(rt.create_event_ex_with_flag(names["ACL_EVENT_SYNC"]))
        names["old_event"], names["dead_event"] = must(rt.create_event()), must(rt.create_event())
        must(rt.destroy_event(names["dead_event"]))
        for name, size in [("small", 100), ("large", 4 * MIB), ("freed", 4 * MIB)]:
            names[name] = must(rt.malloc(size, names["ACL_MEM_MALLOC_HUGE_FIRST"]))
        must(rt.free(names["freed"]))
        names["pinned"], names["freed_pinned"] = must(rt.malloc_host(MIB)), must(rt.malloc_host(MIB))
        must(rt.free_host(names["freed_pinned"]))
        usual = self.prop(0, 0, names["ACL_HBM_MEM_HUGE"], names["ACL_MEM_LOCATION_TYPE_DEVICE"], 0, 0)
        for name, size in [("memory", 4 * MIB), ("unmapped_memory", 2 * MIB), ("freed_memory", 2 * MIB)]:
            names[name] = must(rt.malloc_physical(size, usual, 0))
        must(rt.free_physical(names["freed_memory"]))
        for name in ("area", "released"):
            names[name] = must(rt.reserve_mem_address(64 * MIB, 0, 0, 1))
        must(rt.release_mem_address(names["released"]))
        names["mapped"] = names["area"] + 8 * MIB
        must(rt.map_mem(names["mapped"], 4 * MIB, 0, names["memory"], 0))
        names["exported"] = must(rt.ipc_mem_get_export_key(names["large"], 4 * MIB, 65, 1))
        names["closed"] = must(rt.ipc_mem_get_export_key(names["large"], 4 * MIB, 65, 0))
        must(rt.ipc_mem_close(names["closed"]))
        shared = must(rt.malloc_physical(2 * MIB, usual, 0))
        names["shareable"] = must(rt.mem_export_to_shareable_handle(shared, 0, 1))
        names["config"] = {"numAttrs": 1, "attrs": [{"attr": 2, "value": {"deviceId": 1}}]}
        # The vendor's dicts have no key for this member of the union.
        flag = {"attr": names["ACL_RT_MEM_ATTR_VA_FLAG"], "value": {"rsv": [1]}}
        names["one_address_config"] = {"numAttrs": 1, "attrs": [flag]}
        while acl.get_recent_err_msg() is not None:
            pass

    def value(self, text):
        """A C expression: casts are left out, and so are the ends of numbers."""
        text = text.replace("(uint32_t)-1", "0xFFFFFFFF")
        text = re.sub(r"\((?:void|char|unsigned|size_t|u?int\d+_t|acl\w+)(?: ?\*)?\)", "", text)
        text = re.sub(r"\b(0x[0-9A-Fa-f]+|\d+)(?:ull|u)\b", r"\1", text)
        if text in ("&config", "&one_address_config"):
            return self.names[text[1:]]
        if text in ("&no_attributes", "&many_attributes"):
            raise Unsayable
        # The address of a variable of the C program.
        text = re.sub(r"&\w+", "(plain + 4096)", text)
        return eval(text, {"__builtins__": {}}, self.names)

    def arguments(self, kinds, given):
        """The inputs of the Python function, and the variables for its outputs."""
        inputs, outputs, given = [], [], iter(given)
        for kind in kinds:
            text = next(given)
            if kind[0] == ">":
                if text == "NULL":
                    raise Unsayable
                outputs.append(text.lstrip("&"))
            elif kind == "L":
                length = self.value(next(given))
                if text == "NULL" or not 0 <= length <= 2:
                    raise Unsayable
                inputs.append([os.getppid()] * length)
            elif kind == "E":
                inputs.append([{}, {}])
            elif kind != ".":
                value = self.value(text)
                if kind == "l":
                    value = []
                elif value is None and kind in "Pf":
                    raise Unsayable
                elif value is None and kind != "s":
                    value = {} if kind == "C" else 0
                inputs.append(value)
        return inputs, outputs

    def run(self, section):
        for line, name, given, expected in rows(section):
            if name not in self.served:
                continue
            function, kinds = self.served[name]
            try:
                inputs, outputs = self.arguments(kinds, given)
            except Unsayable:
                self.unsayable.append(line)
                continue
            if name == "aclrtIpcMemGetExportKey" and inputs[2] >= 1024:
                with pytest.raises(ValueError, match="below 1024"):
                    function(*inputs)
                continue
            answer = function(*inputs)
            answers = answer if isinstance(answer, tuple) else (answer,)
            self.names.update(zip(outputs, answers[:-1]))
            self.compared += 1
            if answers[-1] != expected:
                self.wrong.append(f"{line}, not {answers[-1]}: {acl.get_recent_err_msg()}")
            elif expected and name not in ("aclrtPeekAtLastError", "aclrtGetLastError"):
                said = acl.get_recent_err_msg()
                if name != "aclrtMemUceRepair" and not (said or "").startswith(name):
                    self.wrong.append(f"{line}: the sentence is {said!r}")


def test_misuse_is_answered_as_in_the_table_of_the_c_library(ascend_npu):
    program = Program()
    program.run("no device")
    program.prepare()
    program.run("device")
    thread = threading.Thread(target=program.run, args=("other thread",))
    thread.start()
    thread.join()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            program.run("child")
            status = len(program.wrong)
            print(*program.wrong, sep="\n", file=sys.stderr, flush=True)
        finally:
            os._exit(min(status, 1))
    assert os.waitpid(child, 0)[1] == 0, "in the child"
    assert acl.finalize() == 0
    program.run("finalized")
    assert program.wrong == []
    # What of the table is left out is known: outputs and lists that are NULL, wrong lengths.
    assert program.compared >= 380, program.compared
    for line in program.unsayable:
        assert re.search(r"NULL|no_attributes|many_attributes|\(size_t\)-1", line), line
