"""A connection through libpq, by ctypes: what the tests need of it, without a package to install."""

import ctypes
import ctypes.util

_PQ = ctypes.CDLL(ctypes.util.find_library("pq") or "libpq.so.5")
for _name, _result, _arguments in [
    ("PQconnectdb", ctypes.c_void_p, [ctypes.c_char_p]),
    ("PQstatus", ctypes.c_int, [ctypes.c_void_p]),
    ("PQerrorMessage", ctypes.c_char_p, [ctypes.c_void_p]),
    ("PQfinish", None, [ctypes.c_void_p]),
    ("PQexec", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
    ("PQgetResult", ctypes.c_void_p, [ctypes.c_void_p]),
    ("PQresultStatus", ctypes.c_int, [ctypes.c_void_p]),
    ("PQresultErrorField", ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int]),
    ("PQresultErrorMessage", ctypes.c_char_p, [ctypes.c_void_p]),
    ("PQntuples", ctypes.c_int, [ctypes.c_void_p]),
    ("PQnfields", ctypes.c_int, [ctypes.c_void_p]),
    ("PQgetvalue", ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]),
    ("PQgetisnull", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]),
    ("PQclear", None, [ctypes.c_void_p]),
    ("PQputCopyData", ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]),
    ("PQputCopyEnd", ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]),
    ("PQsetNoticeProcessor", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]),
]:
    _function = getattr(_PQ, _name)
    _function.restype, _function.argtypes = _result, _arguments

_COPY_IN = 4
_ERRORS = (5, 7)
_SQLSTATE, _PRIMARY = ord("C"), ord("M")
_IGNORE_NOTICE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)(lambda _argument, _message: None)


class SqlError(Exception):
    """An error of the server. The connection goes on."""

    def __init__(self, sqlstate, message):
        super().__init__(f"{sqlstate}: {message}")
        self.sqlstate = sqlstate
        self.message = message


class ConnectionLost(Exception):
    """The server cannot be reached, or ended the connection."""


class Connection:
    """A session. SQL goes in as text; rows come out as tuples of text or None."""

    def __init__(self, conninfo):
        self._conn = _PQ.PQconnectdb(conninfo.encode())
        if _PQ.PQstatus(self._conn) != 0:
            message = _PQ.PQerrorMessage(self._conn).decode(errors="replace").strip()
            self.close()
            raise ConnectionLost(message)
        _PQ.PQsetNoticeProcessor(self._conn, ctypes.cast(_IGNORE_NOTICE, ctypes.c_void_p), None)

    def close(self):
        """Ends the session."""
        if self._conn:
            _PQ.PQfinish(self._conn)
            self._conn = None

    def execute(self, sql, copy=None):
        """Runs SQL, feeding `copy` (text) to a COPY FROM STDIN; returns the rows of the last statement."""
        result = _PQ.PQexec(self._conn, sql.encode())
        if _PQ.PQresultStatus(result) == _COPY_IN:
            _PQ.PQclear(result)
            data = (copy or "").encode()
            _PQ.PQputCopyData(self._conn, data, len(data))
            _PQ.PQputCopyEnd(self._conn, None)
            result = _PQ.PQgetResult(self._conn)
            while more := _PQ.PQgetResult(self._conn):
                _PQ.PQclear(more)
        try:
            return self._rows(result)
        finally:
            _PQ.PQclear(result)

    def value(self, sql):
        """The first column of the first row, or None."""
        rows = self.execute(sql)
        return rows[0][0] if rows else None

    def _rows(self, result):
        if _PQ.PQresultStatus(result) in _ERRORS or not result:
            if _PQ.PQstatus(self._conn) != 0:
                raise ConnectionLost(_PQ.PQerrorMessage(self._conn).decode(errors="replace").strip())
            state = (_PQ.PQresultErrorField(result, _SQLSTATE) or b"").decode()
            message = (_PQ.PQresultErrorField(result, _PRIMARY) or _PQ.PQresultErrorMessage(result) or b"").decode(errors="replace").strip()
            # libpq's own errors have no SQLSTATE; a server that goes down says so first.
            if not state or state.startswith("57P0"):
                raise ConnectionLost(message)
            raise SqlError(state, message)
        columns = range(_PQ.PQnfields(result))
        return [
            tuple(
                None if _PQ.PQgetisnull(result, row, column) else _PQ.PQgetvalue(result, row, column).decode(errors="replace")
                for column in columns
            )
            for row in range(_PQ.PQntuples(result))
        ]
