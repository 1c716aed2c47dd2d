/* A mock of engines behind OpenAI's API: one thread, no copies that can be spared.
 *
 * upstream PORT [PORT...]
 *
 * Each port is one engine. GET answers what gateways ask of an engine before they use it. POST
 * answers a chat completion: whole, or as a stream where the body asks for one. A mark in the
 * body, "@@events=N,gap=MICROSECONDS@@", says how many tokens a stream has and how far apart the
 * steps are. The first token leaves at once, each further one with a step. An engine steps for all
 * its streams at once, as real ones do, so their events leave together; the steps of two engines
 * are half a gap apart. Each event of a token holds the monotonic nanoseconds at which it was
 * written, as text "t=..". Without a mark eight tokens are streamed as fast as they go.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS_MAX 65536
#define ENGINES_MAX 8

struct connection {
    int engine, listening, closing;
    char *in;
    size_t length, capacity;
    char *out; /* what the socket did not take */
    size_t out_length;
    int streaming, asks_usage;
    long events, sent;
    int64_t gap_ns, next_ns;
};

static struct connection *connections[CONNECTIONS_MAX];
static int streams[CONNECTIONS_MAX], stream_count;
static int poll_fd, timer_fd, engine_count;
static int64_t timer_at_ns;

static const char WHOLE[] =
    "{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1700000000,"
    "\"model\":\"mock\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
    "\"The river passes the old mill before it turns to the west, and from there it is a walk of an "
    "hour to the bridge. Most people take the path along the water, which is longer and has shade in "
    "the afternoon; the road over the hill is shorter and has none at all.\"},\"logprobs\":null,"
    "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":400,\"completion_tokens\":60,"
    "\"total_tokens\":460}}";
static const char CHUNK_BEGIN[] =
    "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\","
    "\"created\":1700000000,\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{";
static const char METRICS[] =
    "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"mock\"} 1\n"
    "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=\"mock\"} 0\n"
    "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=\"mock\"} 0.1\n";
static const char MODELS[] =
    "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1700000000,"
    "\"owned_by\":\"mock\",\"max_model_len\":262144}]}";

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void end_stream(int fd) {
    connections[fd]->streaming = 0;
    for (int i = 0; i < stream_count; i++)
        if (streams[i] == fd) {
            streams[i] = streams[--stream_count];
            return;
        }
}

static void close_connection(int fd) {
    struct connection *c = connections[fd];
    if (c->streaming) end_stream(fd);
    close(fd);
    free(c->in);
    free(c->out);
    free(c);
    connections[fd] = NULL;
}

static void watch(int fd, uint32_t events, int operation) {
    struct epoll_event event = {.events = events, .data.fd = fd};
    if (epoll_ctl(poll_fd, operation, fd, &event)) die("epoll_ctl");
}

static void put(int fd, const char *bytes, size_t length) {
    struct connection *c = connections[fd];
    ssize_t sent = 0;
    if (!c->out_length) {
        sent = send(fd, bytes, length, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN) {
                c->closing = 1;
                return;
            }
            sent = 0;
        }
        if ((size_t)sent == length) return;
        watch(fd, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
    }
    c->out = realloc(c->out, c->out_length + length - sent);
    memcpy(c->out + c->out_length, bytes + sent, length - sent);
    c->out_length += length - sent;
}

static void flush(int fd) {
    struct connection *c = connections[fd];
    ssize_t sent = send(fd, c->out, c->out_length, MSG_NOSIGNAL);
    if (sent < 0) {
        c->closing = errno != EAGAIN;
        return;
    }
    c->out_length -= sent;
    memmove(c->out, c->out + sent, c->out_length);
    if (!c->out_length) watch(fd, EPOLLIN, EPOLL_CTL_MOD);
}

static void reply(int fd, int status, const char *kind, const char *body) {
    char out[4096];
    int length = snprintf(out, sizeof out,
                          "HTTP/1.1 %d OK\r\nserver: mock\r\ncontent-type: %s\r\n"
                          "content-length: %zu\r\n\r\n%s",
                          status, kind, strlen(body), body);
    put(fd, out, length);
}

/* One HTTP chunk that holds one event. */
static size_t framed(char *out, const char *event, size_t length) {
    int head = sprintf(out, "%zx\r\n", length);
    memcpy(out + head, event, length);
    memcpy(out + head + length, "\r\n", 2);
    return head + length + 2;
}

static size_t choice_event(char *out, const char *delta, const char *finish) {
    char event[1024];
    int length = snprintf(event, sizeof event, "%s%s},\"logprobs\":null,\"finish_reason\":%s}]}\n\n",
                          CHUNK_BEGIN, delta, finish);
    return framed(out, event, length);
}

static void token(int fd) {
    struct connection *c = connections[fd];
    char out[1200], delta[64];
    snprintf(delta, sizeof delta, "\"content\":\" t=%lld \"", (long long)now_ns());
    put(fd, out, choice_event(out, delta, "null"));
    if (++c->sent < c->events) return;
    char end[3000];
    size_t length = choice_event(end, "", "\"stop\"");
    if (c->asks_usage) {
        char event[600];
        int size = snprintf(event, sizeof event,
                            "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":"
                            "\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"mock\","
                            "\"choices\":[],\"usage\":{\"prompt_tokens\":400,"
                            "\"completion_tokens\":%ld,\"total_tokens\":%ld}}\n\n",
                            c->sent, c->sent + 400);
        length += framed(end + length, event, size);
    }
    length += framed(end + length, "data: [DONE]\n\n", 14);
    memcpy(end + length, "0\r\n\r\n", 5);
    put(fd, end, length + 5);
    end_stream(fd);
}

static void set_timer(int64_t at_ns) {
    struct itimerspec spec = {.it_value = {at_ns / 1000000000, at_ns % 1000000000}};
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &spec, NULL);
    timer_at_ns = at_ns;
}

static void step(void) {
    int64_t next_ns = 0;
    for (int i = 0; i < stream_count;) {
        int fd = streams[i];
        struct connection *c = connections[fd];
        if (c->next_ns <= now_ns()) {
            c->next_ns += c->gap_ns;
            token(fd);
            if (c->closing) {
                close_connection(fd);
                continue;
            }
            if (!c->streaming) continue; /* another one is in its place now */
        }
        if (!next_ns || c->next_ns < next_ns) next_ns = c->next_ns;
        i++;
    }
    timer_at_ns = 0;
    if (next_ns) set_timer(next_ns);
}

static void begin_stream(int fd, const char *body, size_t length) {
    static const char HEAD[] =
        "HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        "transfer-encoding: chunked\r\n\r\n";
    struct connection *c = connections[fd];
    char out[1600];
    memcpy(out, HEAD, sizeof HEAD - 1);
    size_t size = sizeof HEAD - 1;
    size += choice_event(out + size, "\"role\":\"assistant\",\"content\":\"\"", "null");
    put(fd, out, size);
    long gap_us = 0;
    c->events = 8;
    c->sent = 0;
    c->asks_usage = memmem(body, length, "include_usage", 13) != NULL;
    const char *mark = memmem(body, length, "@@events=", 9);
    if (mark) sscanf(mark, "@@events=%ld,gap=%ld@@", &c->events, &gap_us);
    c->streaming = 1;
    streams[stream_count++] = fd;
    do token(fd);
    while (!gap_us && c->streaming && !c->closing);
    if (!c->streaming) return;
    /* The next step of this engine, of those that all its streams share. */
    c->gap_ns = gap_us * 1000;
    int64_t phase_ns = c->gap_ns * c->engine / engine_count, now = now_ns();
    c->next_ns = ((now - phase_ns) / c->gap_ns + 1) * c->gap_ns + phase_ns;
    if (!timer_at_ns || c->next_ns < timer_at_ns) set_timer(c->next_ns);
}

static void answer(int fd, const char *head, const char *body, size_t length) {
    if (strncmp(head, "POST ", 5)) {
        const char *json = "application/json";
        if (!strncmp(head, "GET /metrics", 12))
            reply(fd, 200, "text/plain; version=0.0.4", METRICS);
        else if (!strncmp(head, "GET /v1/models", 14))
            reply(fd, 200, json, MODELS);
        else
            reply(fd, 200, json, "{\"model_path\":\"mock\",\"served_model_name\":\"mock\"}");
    } else if (memmem(body, length < 512 ? length : 512, "\"stream\":true", 13) ||
               memmem(body, length, "\"stream\":true", 13) ||
               memmem(body, length, "\"stream\": true", 14))
        begin_stream(fd, body, length);
    else
        reply(fd, 200, "application/json", WHOLE);
}

/* Answer the complete requests that have come; 0 where the connection has to be closed. */
static int take(int fd) {
    struct connection *c = connections[fd];
    while (c->length && !c->streaming) {
        c->in[c->length] = 0;
        char *end = memmem(c->in, c->length, "\r\n\r\n", 4);
        if (!end) return c->length < 65536;
        end[2] = 0;
        if (strcasestr(c->in, "\r\ntransfer-encoding:")) {
            fprintf(stderr, "a request without a size is not understood\n");
            return 0;
        }
        const char *size = strcasestr(c->in, "\r\ncontent-length:");
        size_t body = size ? strtoul(size + 17, NULL, 10) : 0, head = end + 4 - c->in;
        if (c->length < head + body) {
            end[2] = '\r';
            if (c->capacity < head + body + 1) {
                c->capacity = head + body + 1;
                c->in = realloc(c->in, c->capacity);
            }
            return 1;
        }
        answer(fd, c->in, c->in + head, body);
        c->length -= head + body;
        memmove(c->in, c->in + head + body, c->length);
        if (c->closing) return 0;
    }
    return 1;
}

static void receive(int fd) {
    struct connection *c = connections[fd];
    if (c->capacity < c->length + 16385) {
        c->capacity = c->length * 2 + 65536;
        c->in = realloc(c->in, c->capacity);
    }
    ssize_t got = recv(fd, c->in + c->length, c->capacity - c->length - 1, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        close_connection(fd);
        return;
    }
    c->length += got;
    if (!take(fd)) close_connection(fd);
}

static void accept_all(int listener) {
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= CONNECTIONS_MAX) die("too many connections");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        connections[fd] = calloc(1, sizeof(struct connection));
        connections[fd]->engine = connections[listener]->engine;
        watch(fd, EPOLLIN, EPOLL_CTL_ADD);
    }
}

static void listen_on(int port, int engine) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 4096)) die("listen");
    connections[fd] = calloc(1, sizeof(struct connection));
    connections[fd]->listening = 1;
    connections[fd]->engine = engine;
    watch(fd, EPOLLIN, EPOLL_CTL_ADD);
}

int main(int count, char **arguments) {
    signal(SIGPIPE, SIG_IGN);
    poll_fd = epoll_create1(0);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    watch(timer_fd, EPOLLIN, EPOLL_CTL_ADD);
    engine_count = count - 1;
    for (int i = 1; i < count && i <= ENGINES_MAX; i++) listen_on(atoi(arguments[i]), i - 1);
    puts("ready");
    fflush(stdout);
    struct epoll_event events[512];
    for (;;) {
        int ready = epoll_wait(poll_fd, events, 512, -1);
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            uint64_t ticks;
            if (fd == timer_fd) {
                if (read(timer_fd, &ticks, sizeof ticks) > 0) step();
            } else if (!connections[fd])
                continue; /* closed by an earlier event */
            else if (connections[fd]->listening)
                accept_all(fd);
            else {
                if (events[i].events & EPOLLOUT) flush(fd);
                if (connections[fd]->closing)
                    close_connection(fd);
                else if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                    receive(fd);
            }
        }
    }
}
