/* Sends requests and times their answers: one thread, nothing parsed that need not be.
 *
 * driver PORT HEADERS_FILE WARM_UP_MS MEASURED_MS REQUESTS_MAX GROUP [GROUP...]
 *
 * A group is CONNECTIONS:BODY_FILE:RATE, where RATE is requests per second of the whole group, or 0
 * for closed loop: each connection sends its next request when the answer before is complete. With
 * a rate, a request that finds no free connection waits for one, and its time counts from when it
 * was due. REQUESTS_MAX (0: none) ends the run after so many answers.
 *
 * Prints "begin" and "end" around what is measured, then one line of JSON with an object for each
 * group. Times are nanoseconds: "whole" from sending to the last byte of an answer, "first" to the
 * first token of a stream, "event" from the writing of a token by the upstream, which its text
 * tells, to its being read here, "gap" between two events of a stream.
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

#define GROUPS_MAX 4
#define HEAD_BYTES_MAX 16384
#define LINE_BYTES_MAX 1024

struct samples {
    int64_t *values;
    size_t count, capacity;
};

struct group {
    int connections, first;
    double rate;
    char *request;
    size_t request_length;
    struct samples whole, first_token, event, gap;
    long answers, errors, opened, waiting;
    int64_t next_due_ns;
    int64_t *due; /* times of requests that wait for a connection, a ring */
    size_t due_begin, due_count;
    int last_status;
};

enum framing { HEAD, SIZED, CHUNK_SIZE, CHUNK_BODY, CHUNK_END, TRAILER, TO_THE_END };

struct connection {
    int fd, busy;
    struct group *group;
    size_t sent;
    int64_t began_ns, event_ns;
    enum framing framing;
    char head[HEAD_BYTES_MAX];
    size_t head_length;
    long left;
    int status, streamed, keeps, seen_first;
    char line[LINE_BYTES_MAX]; /* of an event, as far as it has come */
    size_t line_length;
};

#define DUE_MAX 65536

static struct group groups[GROUPS_MAX];
static struct connection *connections;
static int group_count, poll_fd, timer_fd;
static struct sockaddr_in address;
static int64_t measured_from_ns, measured_to_ns;
static long answers, answers_max;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int measured(int64_t at_ns) {
    return at_ns >= measured_from_ns && at_ns < measured_to_ns;
}

static void add(struct samples *samples, int64_t value) {
    if (samples->count == samples->capacity) {
        samples->capacity = samples->capacity ? samples->capacity * 2 : 1024;
        samples->values = realloc(samples->values, samples->capacity * sizeof value);
    }
    samples->values[samples->count++] = value;
}

static void watch(struct connection *c, uint32_t events, int operation) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    if (epoll_ctl(poll_fd, operation, c->fd, &event)) die("epoll_ctl");
}

static void open_connection(struct connection *c) {
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    c->group->opened++;
    c->busy = 0;
    watch(c, EPOLLIN, EPOLL_CTL_ADD);
}

static void push(struct connection *c) {
    struct group *g = c->group;
    ssize_t sent = send(c->fd, g->request + c->sent, g->request_length - c->sent, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) return; /* reading will tell */
    size_t before = c->sent;
    c->sent += sent > 0 ? sent : 0;
    int whole = c->sent == g->request_length;
    if (!whole)
        watch(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
    else if (before)
        watch(c, EPOLLIN, EPOLL_CTL_MOD);
}

static void ask(struct connection *c, int64_t began_ns) {
    c->busy = 1;
    c->began_ns = began_ns;
    c->event_ns = 0;
    c->sent = 0;
    c->framing = HEAD;
    c->head_length = c->line_length = 0;
    c->status = c->streamed = c->seen_first = 0;
    push(c);
}

static void ask_next(struct connection *c) {
    struct group *g = c->group;
    if (g->rate == 0)
        ask(c, now_ns());
    else if (g->due_count) {
        ask(c, g->due[g->due_begin]);
        g->due_begin = (g->due_begin + 1) % DUE_MAX;
        g->due_count--;
    }
}

static void reopen(struct connection *c) {
    close(c->fd);
    open_connection(c);
}

static void failed(struct connection *c) {
    if (c->busy) {
        c->group->errors++;
        c->group->last_status = c->status;
    }
    reopen(c);
    ask_next(c);
}

static void complete(struct connection *c) {
    int64_t now = now_ns();
    struct group *g = c->group;
    answers++;
    if (c->status != 200 || (c->streamed && !c->seen_first)) {
        g->errors++;
        g->last_status = c->status;
    } else if (measured(now)) {
        g->answers++;
        add(&g->whole, now - c->began_ns);
    }
    c->busy = 0;
    if (!c->keeps) reopen(c);
    ask_next(c);
}

/* A whole line of an event stream. */
static void line(struct connection *c, int64_t now) {
    struct group *g = c->group;
    c->line[c->line_length] = 0;
    char *told = strstr(c->line, " t=");
    if (told) {
        int64_t written_ns = strtoll(told + 3, NULL, 10);
        if (!c->seen_first && measured(now)) add(&g->first_token, now - c->began_ns);
        if (measured(now)) {
            add(&g->event, now - written_ns);
            if (c->event_ns) add(&g->gap, now - c->event_ns);
        }
        c->seen_first = 1;
        c->event_ns = now;
    }
    c->line_length = 0;
}

static void body(struct connection *c, const char *bytes, size_t length, int64_t now) {
    while (c->streamed && length) {
        const char *end = memchr(bytes, '\n', length);
        size_t part = end ? (size_t)(end - bytes) : length;
        size_t room = LINE_BYTES_MAX - 1 - c->line_length;
        size_t kept = part < room ? part : room;
        memcpy(c->line + c->line_length, bytes, kept);
        c->line_length += kept;
        if (!end) return;
        line(c, now);
        bytes += part + 1;
        length -= part + 1;
    }
}

static void read_head(struct connection *c) {
    c->head[c->head_length] = 0;
    c->status = atoi(c->head + 9);
    c->streamed = strcasestr(c->head, "text/event-stream") != NULL;
    c->keeps = strcasestr(c->head, "\r\nconnection: close") == NULL;
    const char *size = strcasestr(c->head, "\r\ncontent-length:");
    if (strcasestr(c->head, "\r\ntransfer-encoding: chunked"))
        c->framing = CHUNK_SIZE;
    else if (size) {
        c->framing = SIZED;
        c->left = strtol(size + 17, NULL, 10);
    } else {
        c->framing = TO_THE_END;
        c->keeps = 0;
    }
    c->head_length = 0;
}

/* Takes bytes of an answer; returns how many, and completes the answer at its end. */
static size_t take(struct connection *c, const char *bytes, size_t length, int64_t now) {
    size_t part;
    const char *end;
    switch (c->framing) {
    case HEAD:
        for (part = 0; part < length;) {
            if (c->head_length >= HEAD_BYTES_MAX - 1) die("a head that is too long");
            c->head[c->head_length++] = bytes[part++];
            if (c->head_length >= 4 && !memcmp(c->head + c->head_length - 4, "\r\n\r\n", 4)) {
                read_head(c);
                if (c->framing == SIZED && !c->left) complete(c);
                break;
            }
        }
        return part;
    case SIZED:
    case CHUNK_BODY:
        part = (size_t)c->left < length ? (size_t)c->left : length;
        body(c, bytes, part, now);
        c->left -= part;
        if (!c->left) {
            if (c->framing == SIZED)
                complete(c);
            else {
                c->framing = CHUNK_END;
                c->left = 2;
            }
        }
        return part;
    case CHUNK_END:
        part = (size_t)c->left < length ? (size_t)c->left : length;
        c->left -= part;
        if (!c->left) c->framing = CHUNK_SIZE;
        return part;
    case CHUNK_SIZE:
    case TRAILER:
        end = memchr(bytes, '\n', length);
        part = end ? (size_t)(end - bytes) + 1 : length;
        if (c->head_length + part >= HEAD_BYTES_MAX) die("a line that is too long");
        memcpy(c->head + c->head_length, bytes, part);
        c->head_length += part;
        if (!end) return part;
        c->head[c->head_length] = 0;
        c->head_length = 0;
        if (c->framing == TRAILER) {
            if (c->head[0] == '\r') complete(c);
            return part;
        }
        c->left = strtol(c->head, NULL, 16);
        c->framing = c->left ? CHUNK_BODY : TRAILER;
        return part;
    case TO_THE_END:
        body(c, bytes, length, now);
        return length;
    }
    return length;
}

static void receive(struct connection *c) {
    static char bytes[262144];
    ssize_t got = recv(c->fd, bytes, sizeof bytes, 0);
    int64_t now = now_ns();
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        if (c->busy && c->framing == TO_THE_END && !got)
            complete(c);
        else
            failed(c);
        return;
    }
    int fd = c->fd;
    for (ssize_t at = 0; at < got && c->busy && c->fd == fd;)
        at += take(c, bytes + at, got - at, now);
}

/* Requests that are due by now, where a group has a rate; returns when the next one is. */
static int64_t send_due(int64_t now) {
    int64_t next_ns = 0;
    for (int i = 0; i < group_count; i++) {
        struct group *g = &groups[i];
        if (g->rate == 0) continue;
        while (g->next_due_ns <= now) {
            if (g->due_count == DUE_MAX) die("far behind the rate");
            g->due[(g->due_begin + g->due_count++) % DUE_MAX] = g->next_due_ns;
            g->next_due_ns += (int64_t)(1e9 / g->rate);
        }
        for (int j = 0; j < g->connections && g->due_count; j++)
            if (!connections[g->first + j].busy) ask_next(&connections[g->first + j]);
        if (!next_ns || g->next_due_ns < next_ns) next_ns = g->next_due_ns;
    }
    return next_ns;
}

static int order(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void print_samples(const char *name, struct samples *s) {
    if (!s->count) {
        printf(",\"%s\":null", name);
        return;
    }
    qsort(s->values, s->count, sizeof *s->values, order);
    printf(",\"%s\":{\"p50\":%lld,\"p90\":%lld,\"p99\":%lld,\"max\":%lld}", name,
           (long long)s->values[s->count / 2], (long long)s->values[s->count * 9 / 10],
           (long long)s->values[s->count * 99 / 100], (long long)s->values[s->count - 1]);
}

static void print_results(double seconds) {
    printf("[");
    for (int i = 0; i < group_count; i++) {
        struct group *g = &groups[i];
        printf("%s{\"seconds\":%.6f,\"answers\":%ld,\"errors\":%ld,\"opened\":%ld,\"status\":%d,"
               "\"events\":%zu",
               i ? "," : "", seconds, g->answers, g->errors, g->opened, g->last_status,
               g->event.count);
        print_samples("whole", &g->whole);
        print_samples("first", &g->first_token);
        print_samples("event", &g->event);
        print_samples("gap", &g->gap);
        printf("}");
    }
    printf("]\n");
}

static char *read_file(const char *path, size_t *length) {
    FILE *file = fopen(path, "rb");
    if (!file) die(path);
    fseek(file, 0, SEEK_END);
    *length = ftell(file);
    rewind(file);
    char *bytes = malloc(*length + 1);
    if (fread(bytes, 1, *length, file) != *length) die(path);
    bytes[*length] = 0;
    fclose(file);
    return bytes;
}

static void make_group(char *text, const char *headers, int first) {
    struct group *g = &groups[group_count++];
    char *path = strchr(text, ':') + 1, *rate = strchr(path, ':');
    *rate++ = 0;
    g->connections = atoi(text);
    g->first = first;
    g->rate = atof(rate);
    g->due = calloc(DUE_MAX, sizeof *g->due);
    size_t body_length, room;
    char *body = read_file(path, &body_length);
    room = body_length + strlen(headers) + 1024;
    g->request = malloc(room);
    int head = snprintf(g->request, room,
                        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                        "content-type: application/json\r\n%scontent-length: %zu\r\n\r\n",
                        headers, body_length);
    memcpy(g->request + head, body, body_length);
    g->request_length = head + body_length;
}

static void set_timer(int64_t at_ns) {
    struct itimerspec spec = {.it_value = {at_ns / 1000000000, at_ns % 1000000000}};
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &spec, NULL);
}

static void run(int64_t end_ns) {
    struct epoll_event events[512];
    int told = 0;
    for (;;) {
        int64_t now = now_ns(), wake_ns = send_due(now);
        if (!told && now >= measured_from_ns) {
            puts("begin");
            fflush(stdout);
            told = 1;
        }
        if (now >= end_ns || (answers_max && answers >= answers_max)) return;
        if (!told && (!wake_ns || measured_from_ns < wake_ns)) wake_ns = measured_from_ns;
        if (!wake_ns || end_ns < wake_ns) wake_ns = end_ns;
        set_timer(wake_ns);
        int ready = epoll_wait(poll_fd, events, 512, -1);
        for (int i = 0; i < ready; i++) {
            struct connection *c = events[i].data.ptr;
            uint64_t ticks;
            if (!c) {
                if (read(timer_fd, &ticks, sizeof ticks) < 0) continue;
            } else {
                if (events[i].events & EPOLLOUT) push(c);
                if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
            }
        }
    }
}

int main(int count, char **arguments) {
    if (count < 7 || count > 6 + GROUPS_MAX) die("arguments");
    signal(SIGPIPE, SIG_IGN);
    size_t length;
    char *headers = read_file(arguments[2], &length);
    address.sin_family = AF_INET;
    address.sin_port = htons(atoi(arguments[1]));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    answers_max = atol(arguments[5]);
    int total = 0;
    for (int i = 6; i < count; i++) {
        make_group(arguments[i], headers, total);
        total += groups[group_count - 1].connections;
    }
    poll_fd = epoll_create1(0);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, timer_fd, &event);
    connections = calloc(total, sizeof *connections);
    for (int i = 0; i < group_count; i++)
        for (int j = 0; j < groups[i].connections; j++) {
            connections[groups[i].first + j].group = &groups[i];
            open_connection(&connections[groups[i].first + j]);
        }
    int64_t began_ns = now_ns();
    measured_from_ns = began_ns + atol(arguments[3]) * 1000000LL;
    measured_to_ns = measured_from_ns + atol(arguments[4]) * 1000000LL;
    for (int i = 0; i < group_count; i++) groups[i].next_due_ns = began_ns;
    for (int i = 0; i < total; i++) ask_next(&connections[i]);
    run(measured_to_ns);
    puts("end");
    fflush(stdout);
    int64_t ended_ns = now_ns();
    if (ended_ns > measured_to_ns) ended_ns = measured_to_ns;
    print_results((ended_ns - measured_from_ns) / 1e9);
    return 0;
}
