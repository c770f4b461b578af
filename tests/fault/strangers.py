"""What somebody without the run's secret tries, as scripts: one on another machine, one as another user of the leader's.

Each prints one JSON object: what was attempted, and how often it came to something.
"""

NETWORK = """
import json, os, resource, select, socket, sys, threading, time
import zmq
from paceline.transport import curve
from paceline.transport.control import ControlClient, Gone, Said
from paceline.transport.secret import Secret
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
leader, knows, places = (sys.argv[1], 29411), Secret(sys.argv[2]), [tuple(one) for one in json.loads(sys.argv[3])]

def relayed():
    "Have one that knows the secret call the leader through here, and keep what it says."
    listening, said = socket.create_server(("127.0.0.1", 0)), b""
    client = ControlClient("127.0.0.1", listening.getsockname()[1], knows, silence_s=5, join_s=10)
    client.send({"not": "a hello"})
    near, far = listening.accept()[0], socket.create_connection(leader)
    until = time.monotonic() + 2
    while (left := until - time.monotonic()) > 0:
        for one in select.select([near, far], [], [], left)[0]:
            chunk = one.recv(1 << 16)
            if one is near:
                said += chunk
            (far if one is near else near).sendall(chunk)
    far.close()
    near.close()
    return said

def speaks(place):
    "Our own ports say something first; gloo's do not, and are left alone."
    with socket.create_connection(place) as one:
        one.settimeout(0.5)
        try:
            return one.recv(1) != b""
        except OSError:
            return False

def send(place, data):
    with socket.create_connection(place) as one:
        try:
            one.sendall(data)
            time.sleep(0.02)
        except OSError:
            pass

def calls(place):
    "Call as a worker would, with a proof that is made up; return whether anything came back."
    with socket.create_connection(place) as one:
        one.settimeout(5)
        nonce = one.recv(64)
        if nonce.startswith(b"\\xff" + bytes(7)):
            return 0  # one of ZeroMQ's
        try:
            one.sendall(os.urandom(48))
            return one.recv(1) != b""
        except ConnectionError:
            return 0

def answers(place, secret, *messages):
    "Speak as one of ours would, but with another secret or none; return how many answers came."
    context = zmq.Context()
    try:
        one = context.socket(zmq.DEALER)
        one.linger, one.rcvtimeo, one.sndtimeo = 0, 1500, 1500
        if secret is not None:
            curve.call(one, secret)
        one.connect("tcp://%s:%d" % place)
        for message in messages:
            one.send_multipart(message)
        # What a port of another kind says first may look like a message of ZeroMQ's first version: no answer to these.
        return int(one.recv_multipart()[0] in [message[0] for message in messages])
    except zmq.Again:
        return 0
    finally:
        context.destroy(linger=0)

def joins():
    "Ask to be let in, with another secret."
    client = ControlClient(*leader, Secret.make(), silence_s=5, join_s=2)
    client.send({"hello": {}})
    select.select([client], [], [], 5)
    heard = client.events()
    client.close()
    return [one.reason for one in heard if isinstance(one, Gone)], sum(isinstance(one, Said) for one in heard)

def ask(place):
    key = b"generation-0/0/0"
    requests = [[b"1", b"set", key, b"mine"], [b"2", b"get", key], [b"3", b"delete", key]]
    for secret in (None, Secret.make()):
        answered.append(answers(place, secret, *requests))
    answered.append(calls(place))
    for number in range(20):
        head = b"\\xff" + bytes(8) + b"\\x7f\\x03\\x01CURVE".ljust(22, b"\\0") + bytes(32)
        send(place, (os.urandom(300), head[: 10 + number], head + os.urandom(200), head[:10] + os.urandom(90))[number % 4])

ours = [place for place in places if speaks(place)]
answered, reasons = [], []
threads = [threading.Thread(target=ask, args=(place,)) for place in ours]
threads.append(threading.Thread(target=lambda: reasons.append(joins())))
for one in threads:
    one.start()
said = relayed()
for _ in range(3):
    send(leader, said)
    send(leader, said[:-7])
for one in threads:
    one.join()
idle = [socket.create_connection(leader) for _ in range(1100)]
idle += [socket.create_connection(place) for place in ours for _ in range(50)]
time.sleep(1.5)
print(json.dumps({"ports": len(ours), "replayed": len(said), "idle": len(idle), "answered": sum(answered), "joined": reasons[0]}))
"""

USER = """
import json, os, socket, sys
pids, paths, found = json.loads(sys.argv[1]), json.loads(sys.argv[2]), []
secret = sys.stdin.read().encode()
reads = refused = 0
for pid in pids:
    for name in ("environ", "cmdline", "mem", "maps"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                content = file.read(1 << 20)
            reads += 1
            found += [f"{pid}/{name}"] if secret in content else []
        except OSError:
            refused += 1
for folder, _, files in os.walk("/tmp"):
    for name in files:
        path = os.path.join(folder, name)
        try:
            if os.path.isfile(path) and "paceline" in path:
                with open(path, "rb") as file:
                    found += [path] if secret in file.read(1 << 20) else []
        except OSError:
            pass
entered = []
for path in paths:
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(path)
            one.sendall(b'{"do": "resize", "workers": 1}')
            entered.append(path)
        except OSError:
            pass
    try:
        os.unlink(path)
        entered.append(path)
    except OSError:
        pass
print(json.dumps({"uid": os.getuid(), "reads": reads, "refused": refused, "found": found, "entered": entered}))
"""
